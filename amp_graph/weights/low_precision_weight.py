"""A low-precision weight, and the memory that several lie in."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_graph.weights.change_tracker import ChangeTracker

Key = tuple[int, torch.dtype]  # of a parameter, by `id`, in a low precision
SPARE = 1.1  # how much larger than all parameters in it memory may be that is copied as a whole


class LowPrecisionWeight:
    """The copy of one parameter in one dtype. It belongs to a parameter object, not to what is in
    it: a parameter may be resized or moved between two calls (`model.to`, `parameter.data = ...`).

    `written` is the memory of `low` with a version of its own, so that to write there does not
    count as a change. `unrecorded` is the same memory once more, as a leaf that requires a
    gradient. Parameters do so in inference, too, where PyTorch takes it for the sign of a weight,
    not to be copied for each matrix of a batch (`should_fold` in ATen's matmul, torch 2.13).
    """

    __slots__ = ("address", "low", "parameter", "unrecorded", "version", "writer", "written")

    def __init__(self, parameter: Tensor, low: Tensor, when_gone: Callable[[Any], object]):
        self.address = 0  # of the memory that the parameter had when a graph last took this
        self.low = low
        self.written = low.data
        self.unrecorded = low.data.requires_grad_()
        self.parameter = weakref.ref(parameter, when_gone)
        self.version = -1
        self.writer: ChangeTracker | None = None  # of the graph that wrote it, if it is kept

    def follow(self, version: int) -> bool:
        """Take over the parameter's version, and return whether it is another than before."""
        changed, self.version = self.version != version, version
        return changed

    def fits(self, parameter: Tensor) -> bool:
        low = self.low
        return (
            self.parameter() is parameter
            and low.shape == parameter.shape
            and low.device == parameter.device
            and low.stride() == parameter.stride()
        )


def memory_for(parameters: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Return memory for a copy of each parameter.

    Where parameters make up one memory, their copies lie in one as well, in the same places: cuDNN
    has the weights of a recurrent layer so, and would put others together anew in each call.
    Parameters that overlap may part later: each copy has its own.
    """
    together: dict[Any, list[Key]] = defaultdict(list)
    for key, p in parameters.items():
        memory = p.untyped_storage()._cdata if is_plain(p) else key
        together[memory, p.dtype, key[1]].append(key)
    made = {}
    for keys in together.values():
        flat = _as_one([parameters[key] for key in keys], keys[0][1])
        for key in keys:
            p = parameters[key]
            if flat is None:
                made[key] = torch.empty_like(p, dtype=key[1], requires_grad=False)
            else:  # with a version of its own
                made[key] = flat.as_strided(p.shape, p.stride(), p.storage_offset()).data
    return made


def _as_one(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Memory like the one that several parameters make up, if they do."""
    if len(parameters) == 1:
        return None
    memory, each = parameters[0].untyped_storage(), parameters[0].element_size()
    length = memory.nbytes() // each
    if length > SPARE * sum(p.numel() for p in parameters):
        return None
    if any(end > begin for (_, end), (begin, _) in pairwise(sorted(map(_extent, parameters)))):
        return None
    return torch.empty(length, dtype=dtype, device=memory.device)


def _extent(parameter: Tensor) -> tuple[Any, Any]:
    """Return where a tensor's elements begin and end in its memory, counted in elements."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    begin = parameter.storage_offset()
    return begin, begin + sum((size - 1) * stride for size, stride in steps) + 1


def is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, Parameter)
