"""Capture cached properties on Python 3.11, too.

    @functools.cached_property
    def mask(self): return torch.ones(n, n).tril()

There such a property takes a lock around what it computes, and Dynamo leaves a frame in which a
lock is taken. One thread captures at a time, and what was cached is guarded: no lock is needed,
and from 3.12 on Python takes none.

Private names of PyTorch used here:

    torch._dynamo.variables.UserDefinedObjectVariable.value
    torch._dynamo.variables.ctx_manager.NullContextVariable
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable

from amp_graph.dynamo_changes.replaced import LOOK_UP


def _look_up(method: Any, variable: Any, frame: Any, name: str) -> Any:
    if name == "lock" and isinstance(variable.value, cached_property):
        return NullContextVariable()
    return method(variable, frame, name)


CHANGES = ((UserDefinedObjectVariable, LOOK_UP, _look_up),)
