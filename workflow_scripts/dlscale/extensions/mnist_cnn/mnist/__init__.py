"""`mnist`: images of digits in IDX files."""
