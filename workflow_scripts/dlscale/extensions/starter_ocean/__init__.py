"""See `study.py`."""
