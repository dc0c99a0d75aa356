"""Extension: a small network that reads digits."""

USES = ("tune",)  # its plan `mnist_sweep` searches by successive halving
STUDIES = {"mnist_cnn": "dlscale.extensions.mnist_cnn.study"}
KINDS = {"mnist": "dlscale.extensions.mnist_cnn.mnist"}
