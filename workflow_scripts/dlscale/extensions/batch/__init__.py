"""Batch of a training step, and comparison of replicas."""
