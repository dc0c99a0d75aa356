"""Compare two results, and show the history of all measurements of a run."""
