"""Optimizers that skip a step whose gradients overflowed, and what they record of that."""
