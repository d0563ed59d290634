"""Ending a graph, so that Python does what comes next.

Private names of PyTorch used here:

    torch._dynamo.exc.unimplemented
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.should_compile_partial_graph,
        .maybe_has_backedge, .active_generic_context_managers    whether a graph can end here
        .parent                             what captures the function that calls this one
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented


def end_graph(what: str, which: Any, why: str = "it is left to Python") -> NoReturn:
    """End the one that Dynamo is capturing. `what`, `which` and `why` are told where it ends."""
    unimplemented(gb_type=what, context=str(which), explanation=why, hints=[])


def can_end(frame: Any) -> bool:
    """Whether the graph can end at this instruction, or at the call that leads to it. In a loop it
    cannot."""
    if frame.active_generic_context_managers or frame.maybe_has_backedge():
        return False
    if frame.parent is None:
        return bool(frame.should_compile_partial_graph())
    return can_end(frame.parent)
