"""The calls of a converted model: what stands before them, and before those of its copies."""
