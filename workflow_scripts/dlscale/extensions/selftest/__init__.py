"""Extension: check what the processes of a run exchange, before its first step."""
