"""`starter`: pairs of arrays, an input and its target; images as a rule."""
