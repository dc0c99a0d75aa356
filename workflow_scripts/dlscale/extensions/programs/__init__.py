"""Measure external programs unchanged: detect their steps, and compute their speed."""
