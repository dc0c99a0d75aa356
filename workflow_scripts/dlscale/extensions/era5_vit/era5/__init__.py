"""`era5`: time series of atmospheric states."""
