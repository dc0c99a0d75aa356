"""Batch of a training step, and check of equal weights on all ranks."""
