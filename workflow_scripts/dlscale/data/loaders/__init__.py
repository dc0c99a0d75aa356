"""Loaders: one module each, with the same `build`, over the one sample stream."""
