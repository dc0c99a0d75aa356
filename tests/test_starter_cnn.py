"""Run, for the shipped study, the tests that `dlscale new-study` gives to a new study."""

from dlscale.extensions.scaffold.template.test_starter_cnn import *  # noqa: F403
