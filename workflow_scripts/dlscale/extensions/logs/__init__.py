"""Import logs of external programs, to compare them with dlscale's runs."""
