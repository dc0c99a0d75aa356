"""Loader `dali`, which reads with NVIDIA DALI."""
