"""Extension: print verdicts on runs."""
