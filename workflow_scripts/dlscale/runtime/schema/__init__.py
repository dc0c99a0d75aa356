"""The typed configuration: what every key means, its default, its bounds.

`base` holds the common behaviour, `dataset` what data is and where it comes from, `run` one fully
resolved training or measurement, `plan` an ordered set of runs, `workflow` the file as a whole.
"""
