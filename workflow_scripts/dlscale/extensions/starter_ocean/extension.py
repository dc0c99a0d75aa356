"""Extension: a small study whose samples have several inputs and a mask."""

STUDIES = {"starter_ocean": "dlscale.extensions.starter_ocean.study"}
KINDS = {"basin": "dlscale.extensions.starter_ocean.basin"}
