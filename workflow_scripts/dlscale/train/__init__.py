"""Training: steps, losses, metrics, schedules and checkpoints."""
