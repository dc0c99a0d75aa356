"""Throughput trials, counts of FLOPs and bytes, device peaks, profilers, telemetry and tuning."""
