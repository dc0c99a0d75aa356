"""Kind of dataset `files`: files that an external program reads."""
