"""Extension: the precisions `fp8` and `fp8_rowwise` (linear layers with 8-bit matrix products, by torchao)."""

PROVIDES = {"float8": "dlscale.extensions.fp8.float8.convert"}
PROBES = {"fp8": "dlscale.extensions.fp8.nodes.probe_gpus"}
