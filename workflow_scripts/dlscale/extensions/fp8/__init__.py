"""Linear layers whose matrix products are in 8 bits."""
