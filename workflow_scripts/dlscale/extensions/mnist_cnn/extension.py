"""Extension: a small network that reads digits."""

STUDIES = {"mnist_cnn": "dlscale.extensions.mnist_cnn.study"}
KINDS = {"mnist": "dlscale.extensions.mnist_cnn.mnist"}
