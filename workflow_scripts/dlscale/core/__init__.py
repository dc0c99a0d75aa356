"""What every layer stands on: errors, files, locks, progress, the table of stages, the registry."""
