"""A module that was given the `__dict__` of a converted model is captured as what it is.

    clone.__dict__.update(model.__dict__)       what stands there in front of the call is for
    clone(x)                                    `model`, and reads that one's parameters

Python's call of it tells whose it is by the frame (`calls/copies.py`). Dynamo has no frame for it,
so that what stands there is taken out as it is looked up.

Private names of PyTorch used here:

    torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable: `LOOK_UP` of
    `replaced`, .value
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from amp_graph.dynamo_changes.replaced import LOOK_UP, Change
from amp_graph.modules import CALL


def _look_up(method: Any, variable: Any, frame: Any, name: str) -> Any:
    if name == CALL:
        leave = getattr(variable.value.__dict__.get(CALL), "leave_copy", None)
        if leave is not None:
            leave(variable.value)
    return method(variable, frame, name)


CHANGES: tuple[Change, ...] = ((UnspecializedNNModuleVariable, LOOK_UP, _look_up),)
