"""Logic of the rules: files, parameters and commands of jobs, and messages before and after them."""
