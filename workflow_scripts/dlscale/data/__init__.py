"""Acquisition, preprocessing, storage, sampling and loading of data."""
