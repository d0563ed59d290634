"""A generator that is None is left out.

    torch.randn(x.shape, generator=None)    ->    torch.randn(x.shape)

Random numbers that are drawn with the one or the other are the same, but the first form takes no
symbolic sizes (2.11 to 2.14), so that a model would be captured anew for each size of a batch.

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable.call_function
"""

from __future__ import annotations

from typing import Any

import torch

DRAWING = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    generator = kwargs.get("generator")
    if generator is not None:
        generator = generator.realize()
        if generator.is_python_constant() and generator.as_python_constant() is None:
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return method(function, frame, args, kwargs)


CALLS = dict.fromkeys(DRAWING, _call)
