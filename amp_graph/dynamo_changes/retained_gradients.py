"""`h.retain_grad()` ends the graph, after which the rest of the model is captured as well.

So do models whose features are looked at (Grad-CAM, saliency). Dynamo refuses as soon as the method
is looked up, where a graph cannot end, and leaves the whole function to Python. Here it refuses
where it is called.

Private names of PyTorch used here; all were seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.TensorVariable.method_attr_retain_grad, .call_method
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables import TensorVariable

from amp_graph.dynamo_changes.replaced import method_inside

NAME = "retain_grad"


@contextlib.contextmanager
def retained_gradients_end_graphs() -> Iterator[None]:
    """Within, Dynamo ends a graph there."""
    refuse = TensorVariable.method_attr_retain_grad

    def call(method: Any, variable: Any, frame: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == NAME:
            return refuse(variable, frame)
        return method(variable, frame, name, *args, **kwargs)

    with (
        method_inside(TensorVariable, refuse.__name__, lambda method, variable, frame: None),
        method_inside(TensorVariable, "call_method", call),
    ):
        yield
