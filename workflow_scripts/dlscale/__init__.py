"""dlscale: a PyTorch model and a dataset become a measured, reproducible scaling study."""

__version__ = "0.1.0"
