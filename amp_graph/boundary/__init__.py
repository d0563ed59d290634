"""The boundary of a graph: values go in and out of it, and gradients out and in, scaled."""
