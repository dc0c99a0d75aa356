"""Loader that reads with NVIDIA DALI."""
