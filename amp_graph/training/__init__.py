"""Training: the boundary of a graph, low-precision weights, the loss scale, guarded optimizers."""
