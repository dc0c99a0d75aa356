"""Loader `dali` (NVIDIA DALI)."""
