"""Before anything runs: what it will cost, and whether the site is ready."""
