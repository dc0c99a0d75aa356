"""Tutorial: residual networks classify images."""
