"""Extension: checks of a site before the first job."""
