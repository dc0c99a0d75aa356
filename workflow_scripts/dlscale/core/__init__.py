"""Core modules that all layers use: errors, files, locks, progress, the table of stages, the registry."""
