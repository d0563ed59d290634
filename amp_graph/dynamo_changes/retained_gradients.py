"""`h.retain_grad()` ends the graph, after which the rest of the model is captured as well.

So do models whose features are looked at (Grad-CAM, saliency). Dynamo refuses as soon as the method
is looked up, where a graph cannot end, and leaves the whole function to Python. Here it refuses
where the method is called.

Private names of PyTorch used here:

    torch._dynamo.variables.TensorVariable.method_attr_retain_grad, .call_method
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import TensorVariable

from amp_graph.dynamo_changes.replaced import Change

NAME = "retain_grad"
REFUSE = TensorVariable.method_attr_retain_grad


def _call_method(
    method: Any, variable: Any, frame: Any, name: str, *args: Any, **kwargs: Any
) -> Any:
    if name == NAME:
        return REFUSE(variable, frame)
    return method(variable, frame, name, *args, **kwargs)


CHANGES: tuple[Change, ...] = (
    (TensorVariable, REFUSE.__name__, lambda method, variable, frame: None),
    (TensorVariable, "call_method", _call_method),
)
