"""Ranks of a run: how they meet, divide a model, exchange values and watch each other."""
