"""Low-precision weights: the copies of float32 parameters that emitted graphs compute with.

They live as long as the conversion and are brought up to date whenever a graph is about to run,
all of a graph's in one fused call. No cheaper rule is always right: writes through `.data` change a
parameter without a trace (its `_version` stays, seen in torch 2.13), so a copy that was kept could
be stale. Who knows that nothing does such things to a model may ask for copies that are `kept`
until a trace of a change is seen (`Policy.refresh_weights`).

All of this runs at every call of a model, so what is done for each single parameter is done in C.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from amp_graph.graphs.aten import SET_GRAD_ENABLED
from amp_graph.modules import are_still
from amp_graph.training.engine import copy_all_
from amp_graph.training.traces import Traces

_version, _shape = attrgetter("_version"), attrgetter("shape")
_Key = tuple[int, torch.dtype]  # of a parameter, by `id`, in a low precision
SPARE = 1.1  # how much larger than all parameters in it memory may be that is copied as a whole


class LowPrecisionWeights:
    """The low-precision copies of one model's parameters, shared by all its graphs.

    kept: whether they are written anew only where a parameter may have changed.
    choosing: held by the one of several threads that looks for those of a graph, or makes them.
    """

    def __init__(self, kept: bool = False) -> None:
        self.kept = kept
        self.choosing = threading.Lock()
        self._copies: dict[_Key, _Copy] = {}

    def of(self, parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[_Copy]:
        """The copy of each in its dtype, made where there is none that fits."""
        keys = [(id(p), dtype) for p, dtype in zip(parameters, dtypes, strict=True)]
        missing = {
            key: parameter
            for key, parameter in zip(keys, parameters, strict=True)
            if key not in self._copies or not self._copies[key].fits(parameter)
        }
        copies = self._copies  # and not itself: what a copy refers to is kept by it
        with torch.inference_mode(False):
            for key, low in _memory_for(missing).items():
                copies[key] = _Copy(missing[key], low, _forgetting(copies, key))
        return [copies[key] for key in keys]


class GraphWeights:
    """Those of them that one graph computes with, for as long as its parameters are the same: a
    copy in each of `dtypes`, of the first of `parameters`; of the others it has none.
    """

    def __init__(
        self,
        store: LowPrecisionWeights,
        dtypes: Sequence[torch.dtype],
        parameters: Sequence[Tensor],
    ):
        copied = parameters[: len(dtypes)]
        copies = store.of(copied, dtypes)
        first = {id(copy): k for k, copy in reversed([*enumerate(copies)])}
        # Else a copy stands further in front, and is written.
        self._are_first = [first[id(copy)] == k for k, copy in enumerate(copies)]
        self._written = [copy.written for copy in compress(copies, self._are_first)]
        self._lows = [copy.low for copy in copies]
        self._unrecorded = [copy.unrecorded for copy in copies]
        self._copies = copies
        self._parameters = [*map(weakref.ref, parameters)]
        self._shapes = [*map(_shape, parameters)]
        self._versions: list[int] = []
        self._traces = Traces() if store.kept and all(map(_leaves_traces, copied)) else None

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the copies are of these: the same objects, of the same shapes. A graph is for one
        device, and for strides that follow from the shapes."""
        return (
            are_still(self._parameters, parameters) and [*map(_shape, parameters)] == self._shapes
        )

    def refreshed(self, parameters: Sequence[Tensor], recorded: bool = True) -> list[Tensor]:
        """Return each parameter in its dtype, as of now, for a call that autograd records or not.

        Unless copies are kept, one is written anew even if nothing is known to have changed. Its
        version counts up only if the parameter's did, so that autograd objects to a backward pass
        through weights that were stepped meanwhile exactly where it would object in float32.
        """
        if not self._copies:
            return []
        parameters = [*parameters[: len(self._copies)]]
        try:
            versions = [*map(_version, parameters)]
        except RuntimeError:  # Inference tensors count no versions, nor does autograd record them.
            versions = [0 if p.is_inference() else p._version for p in parameters]
        if versions != self._versions:
            changed = zip(self._copies, versions, strict=True)
            increment_version([copy.low for copy, version in changed if copy.follow(version)])
            self._versions = versions
        if self._traces is None:
            self._write(parameters)
        else:
            self._write_if_stale(self._traces, parameters, versions)
        return self._lows if recorded else self._unrecorded

    def _write(self, parameters: list[Tensor]) -> None:
        if len(self._written) < len(parameters):
            parameters = [*compress(parameters, self._are_first)]
        records = torch.is_grad_enabled()
        SET_GRAD_ENABLED(False)  # as `no_grad` does, in a dozen calls of Python
        try:
            copy_all_(self._written, parameters)
        finally:
            SET_GRAD_ENABLED(records)

    def _write_if_stale(
        self, traces: Traces, parameters: list[Tensor], versions: Sequence[int]
    ) -> None:
        """Write the copies if a parameter may have changed since this graph last did, or another
        graph wrote them since, perhaps from other memory that was a parameter's meanwhile."""
        seen = traces.look(parameters, versions)
        if not traces.are_new(seen) and all(copy.writer is traces for copy in self._copies):
            return
        self._write(parameters)
        traces.keep(seen, parameters)
        for copy in self._copies:
            copy.writer = traces


def _leaves_traces(parameter: Tensor) -> bool:
    """Not an inference tensor, which has no version, or a subclass with memory of its own."""
    return _is_plain(parameter) and not parameter.is_inference()


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, Parameter)


def _memory_for(parameters: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
    """Memory for a copy of each. Where parameters make up one memory, their copies lie in one as
    well, in the same places: cuDNN has the weights of a recurrent layer so, and would put others
    together anew in each call."""
    together: dict[Any, list[_Key]] = defaultdict(list)
    for key, p in parameters.items():
        memory = p.untyped_storage()._cdata if _is_plain(p) else key
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
    return torch.empty(length, dtype=dtype, device=memory.device)


def _forgetting(copies: dict[_Key, _Copy], key: _Key) -> Callable[[Any], object]:
    return lambda _: copies.pop(key, None)


class _Copy:
    """One parameter in one dtype. It belongs to a parameter object, not to what is in it: a
    parameter may be resized or moved between two calls (`model.to`, `parameter.data = ...`).

    `written` is the memory of `low` with a version of its own, so that to write there does not
    count as a change. `unrecorded` is the same memory once more, as a leaf that requires a
    gradient. Parameters do so in inference, too, where PyTorch takes it for the sign of a weight,
    not to be copied for each matrix of a batch (`should_fold` in ATen's matmul, torch 2.13).
    """

    __slots__ = ("low", "parameter", "unrecorded", "version", "writer", "written")

    def __init__(self, parameter: Tensor, low: Tensor, when_gone: Callable[[Any], object]):
        self.low = low
        self.written = low.data
        self.unrecorded = low.data.requires_grad_()
        self.parameter = weakref.ref(parameter, when_gone)
        self.version = -1
        self.writer: Traces | None = None  # of the graph that wrote it, where copies are kept

    def follow(self, version: int) -> bool:
        """Take over the parameter's version; whether it is another than before."""
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
