"""dlscale: a PyTorch model and a dataset become a measured, reproducible scaling study."""

import os
import site

# Packages beside those of the image (`site.packages`): last, so that they hide nothing that is installed.
if _packages := os.environ.get("DLSCALE_PACKAGES"):
    site.addsitedir(_packages)
