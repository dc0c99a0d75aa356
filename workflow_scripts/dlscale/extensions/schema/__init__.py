"""Extension: schema and reference of the configuration."""
