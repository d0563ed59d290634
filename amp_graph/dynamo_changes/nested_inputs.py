"""Guard that a tensor is not nested, in front of what else is guarded of it.

    model(torch.nested.nested_tensor([...]))        after a call with an ordinary tensor

The guard of a tensor asks for its strides. A nested tensor of the strided layout has none, and its
error, inside of a guard, ends the process. Tensors of modules, which are many, are not asked.

Private names of PyTorch used here:

    torch._dynamo.guards.GuardBuilder.TENSOR_MATCH
    torch._guards.Guard.source, GuardSource             where what is guarded comes from
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._guards import GuardSource

from amp_graph.dynamo_changes.own_guards import guard_by
from amp_graph.dynamo_changes.replaced import Change

GIVEN = (GuardSource.LOCAL, GuardSource.GLOBAL)


def _guard_tensor(method: Any, builder: Any, asked: Any, value: Any = None) -> None:
    if asked.source in GIVEN:
        guard_by(_has_strides, "it is not nested")(builder, asked)
    method(builder, asked, value)


def _has_strides(value: Any) -> bool:
    return type(value) is not torch.Tensor or not value.is_nested


CHANGES: tuple[Change, ...] = ((GuardBuilder, "TENSOR_MATCH", _guard_tensor),)
