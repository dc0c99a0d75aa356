"""Extension: reasons why jobs would run."""
