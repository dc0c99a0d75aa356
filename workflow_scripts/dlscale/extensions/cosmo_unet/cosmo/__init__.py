"""`cosmo`: volumes of dark matter and gas."""
