"""Extension: the self-test of a run's processes before the first step."""

PROVIDES = {"self_test": "dlscale.extensions.selftest.selftest.self_test"}
