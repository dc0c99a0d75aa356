"""Extension: the self-test of a run's processes."""

PROVIDES = {"self_test": "dlscale.extensions.selftest.selftest.self_test"}
