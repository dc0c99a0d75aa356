"""From YAML to validated datasets, plans and fully resolved runs."""
