"""Throughput trials, counting, peaks, profilers, telemetry, tuning."""
