"""Logs of other programs beside dlscale's runs."""
