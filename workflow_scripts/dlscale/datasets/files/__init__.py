"""The kind of dataset `files`: files that a program reads."""
