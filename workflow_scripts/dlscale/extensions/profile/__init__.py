"""Extension: profile some steps of a run."""
