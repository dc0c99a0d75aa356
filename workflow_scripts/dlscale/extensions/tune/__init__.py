"""Extension: search for a run's fastest settings."""
