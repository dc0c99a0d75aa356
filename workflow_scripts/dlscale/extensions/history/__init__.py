"""Speed of each run at each of its measurements."""
