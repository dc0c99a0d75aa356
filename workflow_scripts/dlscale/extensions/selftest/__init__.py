"""Extension: check the values that a run's processes exchange, before the first step."""
