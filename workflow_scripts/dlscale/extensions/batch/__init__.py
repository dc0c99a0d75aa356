"""Batch of a training step, and check of replicas."""
