"""Guard how many items a tuple or list has, where its class answers `len` otherwise, or not at all.

    class Irrep(tuple):                     as in e3nn
        def __len__(self):
            raise NotImplementedError

Dynamo reads the items without asking, and calls `len` when it writes the guards: the error of the
class would leave the model to autocast. A guard here counts the items.

Private names of PyTorch used here:

    torch._dynamo.guards.GuardBuilder.SEQUENCE_LENGTH, .TYPE_MATCH, .get
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.guards import GuardBuilder

from amp_graph.dynamo_changes.own_guards import guard_by
from amp_graph.dynamo_changes.replaced import Change

KINDS = (tuple, list)


def _guard_length(method: Any, builder: Any, asked: Any) -> None:
    value = builder.get(asked)
    kind = next((kind for kind in KINDS if isinstance(value, kind)), None)
    if kind is None or type(value).__len__ is kind.__len__:
        method(builder, asked)
        return
    builder.TYPE_MATCH(asked)
    length = kind.__len__(value)
    guard_by(_has_items, f"it has {length} items", kind, length)(builder, asked)


def _has_items(kind: Any, length: int, value: Any) -> bool:
    return bool(kind.__len__(value) == length)


CHANGES: tuple[Change, ...] = ((GuardBuilder, "SEQUENCE_LENGTH", _guard_length),)
