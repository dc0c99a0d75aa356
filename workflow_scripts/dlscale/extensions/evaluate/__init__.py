"""Score the weights of trained runs."""
