"""Check of a run's processes before its first step."""

PROVIDES = {"self_test": "dlscale.extensions.selftest.selftest.self_test"}
