"""Low-precision weights: when they are made anew, and from which parameters."""
