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

KEPT = 8
SEVERAL = 3  # of a kind, none of which holds: the next one goes on where they left off

_lock = threading.Lock()
_kept: list[tuple[Kind, Captures]] = []  # the latest first


@dataclass(frozen=True)
class Kind:
    """What Dynamo does not guard of a model, or never takes for a symbol, and how it is converted.

    code: the class, its `forward` or what else it is entered by, and the `forward` of its parts.
    ties: of each module, parameter and buffer, in order, which one of them it is.
    shapes: of its parameters.
    """

    code: tuple[Any, ...]
    ties: tuple[int, ...]
    shapes: tuple[Size, ...]
    policy: Policy
    lists: OpLists


def kind_of(entry: Entry, compiler: Compiler) -> Kind | None:
    """None for a model that has its captures for itself: what Inductor compiles may go by the
    addresses of its parameters, saved plans are for one model, a parametrized part has a class of
    its own, which holds it and which graphs hold, and one that is converted by itself may have
    another policy. Not asked about models with hooks, such as FSDP's."""
    module = entry.module
    if compiler.policy.is_compiled or compiler.saved is not None:
        return None
    if converted_parts(module) or any("parametrizations" in m._modules for m in module.modules()):
        return None
    shapes = (*(parameter.shape for parameter in module.parameters()),)
    return Kind(Forwards(entry).all, _ties(module), shapes, compiler.policy, compiler.lists)


def _ties(module: nn.Module) -> tuple[int, ...]:
    first: dict[int, int] = {}
    held = (
        id(value)
        for part in module.modules()
        for values in (part._modules, part._parameters, part._buffers)
        for value in values.values()
    )
    return tuple(first.setdefault(key, n) for n, key in enumerate(held))


def captures_for(kind: Kind) -> list[Captures]:
    """Those of models of this kind, the latest first."""
    with _lock:
        return [captures for known, captures in _kept if known == kind]


def number_for(hosts: Sequence[Captures]) -> int | None:
    """Under which number one is captured that is like these, and for which none of them holds: if
    they are several, that of the latest, so that Dynamo knows which numbers and sizes change from
    one to the next (a counter in a part that they share) and takes them for symbols. None, for one
    of its own, if that was tried and is of no use."""
    if len(hosts) < SEVERAL:
        return None
    ((_, most),) = Counter(host.number for host in hosts).most_common(1)
    return hosts[0].number if most < SEVERAL else None


def keep(kind: Kind, captures: Captures) -> None:
    """Keep captures, or note that they were of use."""
    with _lock:
        others = [entry for entry in _kept if entry[1] is not captures]
        _kept[:] = [(kind, captures), *others][:KEPT]


def forget() -> None:
    """Keep none of those that were."""
    with _lock:
        _kept.clear()
