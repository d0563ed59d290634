"""Gradients in PyTorch: autograd's engine, the memory they are in, and whether they are finite."""
