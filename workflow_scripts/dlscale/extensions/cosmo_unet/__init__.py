"""Tutorial: a 3D U-Net predicts gas from dark matter (SC22)."""
