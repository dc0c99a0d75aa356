"""dlscale: a PyTorch model and a dataset become a measured, reproducible scaling study."""
