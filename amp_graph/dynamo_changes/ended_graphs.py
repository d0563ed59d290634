"""Ending a graph, so that Python does what comes next.

Private names of PyTorch used here:

    torch._dynamo.exc.unimplemented
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented


def end_graph(what: str, which: Any, why: str = "it is left to Python") -> NoReturn:
    """End the one that Dynamo is capturing. `what`, `which` and `why` are told where it ends."""
    unimplemented(gb_type=what, context=str(which), explanation=why, hints=[])
