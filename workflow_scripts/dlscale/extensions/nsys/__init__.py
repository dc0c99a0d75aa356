"""NVIDIA Nsight Systems as a profiler, and its reports."""
