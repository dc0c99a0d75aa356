"""Kind of dataset `basin`: temperatures of simulated ocean basins before and after mixing."""
