"""Extension: memory and compilations of a process while it trains."""
