"""Extension: prediction of the memory of a step."""
