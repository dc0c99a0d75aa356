"""Several processes on one model: who they are, and what they do together."""
