"""Experiment trackers beside TensorBoard."""
