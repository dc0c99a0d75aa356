"""The base of every layer: errors, files, locks, progress, the table of stages, the registry."""
