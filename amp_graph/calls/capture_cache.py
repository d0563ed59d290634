"""Captures of models, for others to come that are alike: a copy in each round of federated or
meta-learning, the next one of an ensemble, of a search, of a cross-validation.

They are kept when their model is gone, the latest ones: graphs, and no tensor of the model.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, nn

from amp_graph.backend.compiler import Compiler
from amp_graph.calls.copies import converted_parts
from amp_graph.capture.captures import Captures
from amp_graph.modules import Entry, Forwards
from amp_graph.oplists import OpLists
from amp_graph.policy import Policy

SIZE = 8
SEVERAL = 3  # with one key, none of which holds: the next one goes on where they left off

_lock = threading.Lock()
_cache: list[tuple[CacheKey, Captures]] = []  # the latest first


@dataclass(frozen=True)
class CacheKey:
    """The features of a model that Dynamo does not guard, or never takes for a symbol, and how the
    model is converted. Models that have one key may be called by each other's captures.

    code: the class, its `forward` or the method it is entered by, and the `forward` of its parts.
    ties: for each module, parameter and buffer, in order, the first that is the same object.
    shapes: those of its parameters.
    """

    code: tuple[Any, ...]
    ties: tuple[int, ...]
    shapes: tuple[Size, ...]
    policy: Policy
    lists: OpLists


def cache_key(entry: Entry, compiler: Compiler) -> CacheKey | None:
    """Return a model's key; None for a model that has its captures for itself.

    That is so if Inductor compiles them, which may go by the addresses of parameters; for saved
    plans, which are for one model; for a parametrized part, whose class holds the part, and is held
    by graphs; and for a part that is converted by itself, perhaps by another policy. Not asked
    about models with hooks, such as FSDP's.
    """
    module = entry.module
    if compiler.policy.is_compiled or compiler.saved is not None:
        return None
    if converted_parts(module) or any("parametrizations" in m._modules for m in module.modules()):
        return None
    shapes = (*(parameter.shape for parameter in module.parameters()),)
    return CacheKey(Forwards(entry).all, _ties(module), shapes, compiler.policy, compiler.lists)


def _ties(module: nn.Module) -> tuple[int, ...]:
    first: dict[int, int] = {}
    held = (
        id(value)
        for part in module.modules()
        for values in (part._modules, part._parameters, part._buffers)
        for value in values.values()
    )
    return tuple(first.setdefault(key, n) for n, key in enumerate(held))


def cached(key: CacheKey) -> list[Captures]:
    """Return the captures of models with this key, the latest first."""
    with _lock:
        return [captures for known, captures in _cache if known == key]


def number_for(hosts: Sequence[Captures]) -> int | None:
    """Return the number to capture a model under that is like these, though none of them holds for
    it.

    From several on it is that of the latest, so that Dynamo knows which numbers and sizes change
    from one model to the next (a counter in a part that they share) and takes them for symbols.
    None, for a number of its own, if that was tried in vain.
    """
    if len(hosts) < SEVERAL:
        return None
    ((_, most),) = Counter(host.number for host in hosts).most_common(1)
    return hosts[0].number if most < SEVERAL else None


def store(key: CacheKey, captures: Captures) -> None:
    """Keep captures, or note that they were of use."""
    with _lock:
        others = [entry for entry in _cache if entry[1] is not captures]
        _cache[:] = [(key, captures), *others][:SIZE]


def clear() -> None:
    """Drop all captures that were kept."""
    with _lock:
        _cache.clear()
