"""Results of a plan as a Workflow Run RO-Crate."""
