"""Precisions `fp8` and `fp8_rowwise`: linear layers whose matrix products are in 8 bits, by torchao."""

PROVIDES = {"float8": "dlscale.extensions.fp8.float8.convert"}
