"""Extension: find the lines and collective operations at which processes hang."""
