"""Views of a plan for people and programs. Nothing here decides or changes anything."""

import random

from amp_graph.inspection.plan_text import render

__all__ = ["render"]


def _import_rich() -> None:
    """Import rich with Python's random state put back: the import draws from it, and it is the
    script's."""
    state = random.getstate()
    import rich.style  # noqa: F401

    random.setstate(state)


_import_rich()
