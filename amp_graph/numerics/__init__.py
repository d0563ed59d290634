"""Running a model in float32 and in mixed precision, node by node, to see what the numbers do.

Nothing here is part of a converted model: it is captured anew, so that what is not asked for
costs nothing.
"""
