"""Study `starter_ocean`: batches are dicts, with two inputs and a mask."""
