"""Profiler `nsys` (NVIDIA Nsight Systems), and its reports."""
