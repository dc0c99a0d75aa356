"""Core modules that all layers use, such as errors, files, progress, stages and the registry."""
