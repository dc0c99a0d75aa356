"""The ranks of a run: who they are, and what they exchange."""
