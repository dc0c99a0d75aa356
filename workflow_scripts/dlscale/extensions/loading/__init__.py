"""Extension: times of loaders, and layout of the data that loaders read."""
