"""Extension: search for the fastest settings of a run."""
