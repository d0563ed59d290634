"""A hook that captured code puts on a tensor from code under autocast returns the tensor's dtype.

    x.register_hook(lambda gradient: module.kept * gradient)

Such a tensor is in low precision, and so is its gradient; what the hook has kept of the graph is in
float32, as all that leaves a graph. So the hook would return a float32 gradient, which autograd
refuses. Here it is cast back.

Private names of PyTorch used here:

    torch._dynamo.side_effects.SideEffects.register_hook
    torch._dynamo.variables.VariableTracker.reconstruct
    torch._dynamo.codegen.PyCodegen.add_push_null, load_import_from
    torch._dynamo.bytecode_transformation.create_call_function
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import VariableTracker

from amp_graph.outer_autocast import autocast_devices

Hook = Callable[[Tensor], Tensor | None]


def _register_hook(method: Any, effects: Any, tensor: Any, hook: Any, *others: Any) -> None:
    is_low = any(map(torch.is_autocast_enabled, autocast_devices()))
    method(effects, tensor, _KeepingDtype(hook) if is_low else hook, *others)


class _KeepingDtype(VariableTracker):
    """The variable for the result of `keeping_dtype`."""

    def __init__(self, hook: VariableTracker, **own: Any):
        super().__init__(**own)
        self.hook = hook

    def reconstruct(self, codegen: Any) -> None:
        make = keeping_dtype.__name__
        codegen.add_push_null(lambda: codegen.load_import_from(__name__, make))
        codegen(self.hook)
        codegen.extend_output(create_call_function(1, False))


def keeping_dtype(hook: Hook) -> Hook:
    @functools.wraps(hook)
    def kept(gradient: Tensor) -> Tensor | None:
        result = hook(gradient)
        return result.to(gradient.dtype) if isinstance(result, Tensor) else result

    return kept


CHANGES = ((SideEffects, "register_hook", _register_hook),)
