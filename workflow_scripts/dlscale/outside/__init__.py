"""Former name of `dlscale.extensions.programs`; imports of `dlscale.outside.timed` work until the next release."""
