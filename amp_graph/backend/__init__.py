"""The backend: one graph that Dynamo captured goes in, what runs instead of it comes out."""
