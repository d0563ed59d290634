"""A product that is written into a tensor (`out=`) is computed first, then copied.

    torch.mm(x, y, out=tile)   ->   tile.copy_(torch.mm(x, y))

Losses that never hold all logits compute them by tiles of one buffer, of which the last is
narrower. Where a tile has gaps, Dynamo ends the graph, for the sake of compilers that make copies
of what is written. And a product that is written at once has the precision of what it is written
to. What Dynamo ends a graph for besides, such as another shape, ends it as ever.

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable.call_function    an operator
    torch._dynamo.variables.TensorVariable.as_proxy, .call_method          a value of the graph
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import TensorVariable

PRODUCTS = (torch.mm, torch.bmm, torch.matmul, torch.linalg.matmul)


def _multiply(method: Any, product: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    out = kwargs.get("out")
    if isinstance(out, TensorVariable):
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        result = method(product, frame, args, rest)
        if _is_like(_fake(result), _fake(out)):
            return out.call_method(frame, "copy_", [result], {})
    return method(product, frame, args, kwargs)


def _is_like(result: Tensor, out: Tensor) -> bool:
    """Whether a result can be written at once. Autograd records no such write."""
    if result.dtype is not out.dtype or result.requires_grad or out.requires_grad:
        return False
    return result.shape == out.shape


def _fake(value: Any) -> Tensor:
    fake: Tensor = value.as_proxy().node.meta["example_value"]
    return fake


CALLS = dict.fromkeys(PRODUCTS, _multiply)
