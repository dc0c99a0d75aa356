"""Extension: a two-page sheet of evidence for a request for computing time."""
