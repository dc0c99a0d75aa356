"""Tutorial: a small network reads digits."""
