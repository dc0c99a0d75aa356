"""Run the tests that `dlscale new-study` gives to a study for the shipped study."""

from dlscale.studies.template.test_starter_cnn import *  # noqa: F403
