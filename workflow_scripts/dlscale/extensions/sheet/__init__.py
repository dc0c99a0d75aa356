"""Extension: a two-page sheet of evidence for a request of computing time."""
