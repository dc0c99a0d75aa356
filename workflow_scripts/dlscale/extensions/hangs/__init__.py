"""Extension: names of the lines and collective operations in which processes wait."""
