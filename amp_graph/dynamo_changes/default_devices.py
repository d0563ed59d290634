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

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.symbolic_torch_function_state:
    .mode_stack, .torch_function_mode_enabled
    torch._dynamo.variables.tensor.SymNodeVariable.as_tensor
    torch.utils._device.DeviceContext, _device_constructors
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.utils._device import DeviceContext, _device_constructors

from amp_graph.dynamo_changes.replaced import with_entries

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


def _as_tensor(method: Any, number: Any, frame: Any, dtype: Any) -> Any:
    with with_entries(vars(frame.symbolic_torch_function_state), {ENABLED: False}):
        return method(number, frame, dtype)


AROUND = () if torch.__version__ >= "2.13" else (_make,)
CHANGES = ((SymNodeVariable, "as_tensor", _as_tensor),)
