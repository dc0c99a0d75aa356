"""Study `starter_ocean`."""
