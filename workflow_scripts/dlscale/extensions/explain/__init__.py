"""Extension: verdicts on runs, in a terminal."""
