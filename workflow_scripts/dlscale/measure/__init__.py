"""Measurements of a run: throughput, FLOPs and bytes, device peaks, records of profiles, and telemetry."""
