"""The tests that `dlscale new-study` gives to a study, on the shipped one."""

from dlscale.studies.template.test_starter_cnn import *  # noqa: F403
