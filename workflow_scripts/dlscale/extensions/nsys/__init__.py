"""Profiler `nsys` (NVIDIA Nsight Systems)."""
