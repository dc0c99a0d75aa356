"""How stages become processes: sites, engines, starters, Slurm requests, images."""
