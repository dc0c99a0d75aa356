"""Kind of dataset `starter`: pairs of arrays, an input and its target, usually images."""
