"""The kinds of datasets, a folder each."""
