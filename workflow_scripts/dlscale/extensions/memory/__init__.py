"""Extension: prediction of a step's memory."""
