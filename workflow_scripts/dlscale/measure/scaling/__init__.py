"""How a run scales: a model of machine and work, fitted to a few measured points, that says what more devices do."""
