"""Extension: a 3D U-Net that predicts gas from dark matter (SC22)."""

STUDIES = {"cosmo_unet": "dlscale.extensions.cosmo_unet.study"}
KINDS = {"cosmo": "dlscale.extensions.cosmo_unet.cosmo"}
