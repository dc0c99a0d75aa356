"""Checks before jobs run: their cost, and whether the site is ready."""
