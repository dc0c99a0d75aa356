"""Former name of `dlscale.extensions.programs`; imports of `timed` work until the next release."""
