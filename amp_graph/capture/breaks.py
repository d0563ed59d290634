"""Where and why Dynamo stopped capturing, as it says.

Private names of PyTorch used here; all were seen to work on 2.11, 2.13 and 2.15:

    GraphModule.compile_subgraph_reason      why a graph ended; reports say nothing without it
    TorchDynamoException.real_stack          where Dynamo was in the model's code
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode


def break_in(graph: fx.GraphModule) -> list[str]:
    """Where and why Dynamo ended this graph early, if it did: "net.py:12, print(x): why"."""
    ending: Any = getattr(graph, "compile_subgraph_reason", None)
    if not getattr(ending, "graph_break", False):
        return []
    reason = str(ending.reason).strip().splitlines()
    return [_at(ending.user_stack, reason[0] if reason else "unknown reason")]


def why_not_captured(error: Exception) -> str:
    """Where and why Dynamo gave up on a model, with what an operator raised on fake tensors."""
    text = str(error).strip()
    reason = text.splitlines()[0] if text else type(error).__name__
    _, got, raised = text.partition(": got ")
    if got:
        reason = f"{reason}: {raised.splitlines()[0]}"
    return _at(getattr(error, "real_stack", None) or (), reason)


def depends_on_data(error: Exception) -> bool:
    """Whether Dynamo says that it gave up at a number or a size that is not known before the data
    is. It gives up there in other words, too."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return True
    return str(error).startswith("PendingUnbackedSymbolNotFound")  # raised as an internal error


def _at(frames: Sequence[Any], reason: str) -> str:
    where = [f"{f.filename.rpartition('/')[2]}:{f.lineno}, {f.line}: " for f in frames[-1:]]
    return f"{''.join(where)}{reason}"
