"""One file a study: what is particular to it and nothing more."""
