"""A buffer in whose place a model puts a longer one, as inputs get longer: biases, rotary angles.

    if self.bias.shape[-1] < x.shape[1]:
        self.register_buffer("bias", distances(x.shape[1]), persistent=False)

To Dynamo a buffer has one size for good, so that each new one would be captured anew, and with it
the size of the input that it was made for. It is symbolic from the call on in which the buffer of
a module is seen to have another size than in the first.

Private names of PyTorch used here:

    torch._dynamo.variables.builder._automatic_dynamic(tensor, tx, source, static_shapes, ...)
                                             which sizes of a tensor are symbolic
    torch._dynamo.variables.builder.record_automatic_dynamic(tx, name, tensor)
                                             note a size that it had in a call
    torch._dynamo.source.DictGetItemSource, UnspecializedParamBufferSource
                                             where a buffer is: .base.member, .base.base, .index
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.source import DictGetItemSource, UnspecializedParamBufferSource
from torch._dynamo.variables import builder

from amp_graph.dynamo_changes.own_guards import value_of
from amp_graph.dynamo_changes.replaced import Change

# By module and name, the size and strides that a buffer had when it was first captured.
_first: WeakKeyDictionary[nn.Module, dict[str, tuple[Any, Any]]] = WeakKeyDictionary()


def _sizes_of(
    function: Any, tensor: Any, frame: Any, source: Any, is_static: bool, *rest: Any, **named: Any
) -> Any:
    if is_static and type(tensor) is torch.Tensor and is_buffer(source):
        now = tensor.size(), tensor.stride()
        firsts = _first.setdefault(value_of(source.base.base, frame), {})
        first = firsts.setdefault(source.index, now)
        if first[0] != now[0] and len(first[0]) == len(now[0]):
            before = torch.empty_strided(*first, dtype=tensor.dtype, device="meta")
            builder.record_automatic_dynamic(frame, source.name, before)
            is_static = False
    return function(tensor, frame, source, is_static, *rest, **named)


def is_buffer(source: Any) -> bool:
    """Whether a source stands for a buffer of a module."""
    if not isinstance(source, DictGetItemSource):
        return False
    held = source.base
    return isinstance(held, UnspecializedParamBufferSource) and held.member == "_buffers"


CHANGES: tuple[Change, ...] = ((builder, "_automatic_dynamic", _sizes_of),)
