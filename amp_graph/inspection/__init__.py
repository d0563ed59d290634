"""Views of a plan for people and programs. Nothing here decides or changes anything."""

from amp_graph.inspection.text import render

__all__ = ["render"]
