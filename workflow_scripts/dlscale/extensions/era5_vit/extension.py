"""Extension: a vision transformer that predicts the weather (SC23 to SC25)."""

STUDIES = {"era5_vit": "dlscale.extensions.era5_vit.study"}
KINDS = {"era5": "dlscale.extensions.era5_vit.era5"}
