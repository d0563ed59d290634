"""ATen graphs: how to read a node, what an operator is made of, how graphs are put otherwise."""
