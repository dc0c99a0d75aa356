"""Throughput trials (profilers, telemetry and FLOP counts join here)."""
