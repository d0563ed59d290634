"""New tensors lie on the default device, as outside of a capture.

    torch.set_default_device("cuda")
    positions = torch.arange(x.shape[1])        or `with torch.device("cuda"):` around the call

Before torch 2.13 Dynamo knows of `torch.zeros` and a few others that they make tensors, and has the
rest on the CPU: the graph ends where one meets another tensor, and the retrace would leave it
there.

    self.rate = math.exp(-self.step)            a number that leaves the graph, as a tensor

When it comes to that there is nothing left to capture, but Dynamo goes through the mode of the
default device once more, and the graph returns None for the number. It need not: any device will
do.

    if np.log(x.shape[1]) > 2:                  a comparison of NumPy's

To Dynamo what NumPy returns is a tensor, whose operators are the mode's.

    x.unflatten(2, (heads, -1))                 a method that PyTorch has in Python
    self.layer.to(x.device)

The mode calls `Tensor.unflatten`, and before torch 2.15 Dynamo does not know the method of the same
name that it calls of the class below. Before 2.14 it has no hash for a function that it captures
other code for, as that which reads what a module is to be moved to.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.symbolic_torch_function_state:
    .mode_stack, .torch_function_mode_enabled
    torch._dynamo.variables.BuiltinVariable._handle_insert_op_in_graph, NumpyNdarrayVariable,
    TensorVariable
    torch._dynamo.variables.functions.PolyfilledFunctionVariable.hash_impl, .fn (or
    .is_python_hashable and .get_python_hash)
    torch._dynamo.variables.misc.SuperVariable.call_method, .typevar, .objvar
    torch._dynamo.variables.tensor.SymNodeVariable.as_tensor
    torch.utils._device.DeviceContext, _device_constructors
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    NumpyNdarrayVariable,
    TensorVariable,
)
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.misc import SuperVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.utils._device import DeviceContext, _device_constructors

from amp_graph.dynamo_changes.replaced import existing, with_entries

ENABLED = "torch_function_mode_enabled"


def _make(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    device = _default_in(frame.symbolic_torch_function_state)
    if device is not None and function.value in _device_constructors():
        asked = kwargs.get("device", ConstantVariable.create(None)).realize()
        if asked.is_python_constant() and asked.as_python_constant() is None:
            kwargs = {**kwargs, "device": ConstantVariable.create(device)}
    return method(function, frame, args, kwargs)


def _default_in(state: Any) -> torch.device | None:
    if not vars(state)[ENABLED]:
        return None
    modes = [mode.value for mode in state.mode_stack]
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def _outside_of_modes(frame: Any) -> contextlib.AbstractContextManager[None]:
    return with_entries(vars(frame.symbolic_torch_function_state), {ENABLED: False})


def _as_tensor(method: Any, number: Any, frame: Any, dtype: Any) -> Any:
    with _outside_of_modes(frame):
        return method(number, frame, dtype)


def _operate(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if any(type(value) is NumpyNdarrayVariable for value in args):
        with _outside_of_modes(frame):
            return method(function, frame, args, kwargs)
    return method(function, frame, args, kwargs)


def _below_tensor(
    method: Any, below: Any, frame: Any, name: str, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    is_tensors = below.typevar.is_python_constant() and below.typevar.as_python_constant() is Tensor
    if is_tensors and isinstance(below.objvar, TensorVariable):
        return below.objvar.call_method(frame, name, args, kwargs)
    return method(below, frame, name, args, kwargs)


_HASHES: dict[str, Callable[..., Any]] = {  # as versions of PyTorch call it
    "hash_impl": lambda _, function, frame: (hash(function.fn), False),
    "is_python_hashable": lambda _, function: True,
    "get_python_hash": lambda _, function: hash(function.fn),
}

AROUND = () if torch.__version__ >= "2.13" else (_make,)
CHANGES = (
    (SymNodeVariable, "as_tensor", _as_tensor),
    (BuiltinVariable, "_handle_insert_op_in_graph", _operate),
    (SuperVariable, "call_method", _below_tensor),
    *existing(*((PolyfilledFunctionVariable, name, change) for name, change in _HASHES.items())),
)
