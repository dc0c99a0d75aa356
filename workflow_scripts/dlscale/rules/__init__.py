"""The logic behind the rules: from wildcards to jobs, and what a call says before and after them."""
