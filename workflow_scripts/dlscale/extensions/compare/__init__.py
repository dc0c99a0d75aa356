"""Show the speed of each run at each of its measurements."""
