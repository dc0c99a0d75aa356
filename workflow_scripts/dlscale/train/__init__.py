"""The trainer: steps, losses, metrics, schedules, checkpoints."""
