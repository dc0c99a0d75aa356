"""Study `program`: any external training program, unchanged."""
