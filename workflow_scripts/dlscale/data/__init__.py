"""Acquisition, preprocessing, storage, sampling and loaders."""
