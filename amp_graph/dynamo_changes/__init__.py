"""Changes to Dynamo while it captures for this package, so that less ends a graph; a file each.

The private names of PyTorch that a file lists were seen to work on 2.11 and 2.13 to 2.15, unless it
says otherwise.
"""
