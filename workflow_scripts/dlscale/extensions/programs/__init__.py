"""Programs of others, measured as they are: how their steps are seen, and what their speed comes to."""
