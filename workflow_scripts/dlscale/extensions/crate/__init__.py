"""Pack the results of a plan as a Workflow Run RO-Crate."""
