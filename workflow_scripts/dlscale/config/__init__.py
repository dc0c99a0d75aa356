"""Configuration: from YAML files to validated datasets, plans and fully resolved runs."""
