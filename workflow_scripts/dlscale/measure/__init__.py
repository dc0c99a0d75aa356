"""Measurements of a run: throughput, FLOPs and bytes, device peaks, profiles, telemetry and tuning."""
