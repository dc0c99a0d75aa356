"""The study `program`: any training program, as it is."""
