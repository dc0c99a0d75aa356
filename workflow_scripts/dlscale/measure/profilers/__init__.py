"""Profilers, each a module: what starts it around some steps of a run, and what reads its report."""
