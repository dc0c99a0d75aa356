"""Extension: the speed-up of an external program with a loader that costs nothing."""
