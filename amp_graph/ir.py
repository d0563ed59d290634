"""The nouns of the compiler: plain, frozen data that the passes hand to one another.

Nothing here imports the rest of the package, and nothing here runs a model.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


class Color(enum.Enum):
    """Which list an operator is on; after `paint`, what was decided for a node.

    `KEEP` is on no list: the node has no float32 tensor to convert, or the model's own code
    fixed its precision. It runs exactly as captured.
    """

    ALLOW = "allow"
    DENY = "deny"
    INFER = "infer"
    CLEAR = "clear"
    KEEP = "keep"


@dataclass(frozen=True)
class TensorFacts:
    """One tensor a node returns. `numel` is the size hint where the shape is symbolic."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    device: str
    numel: int

    @property
    def is_float32(self) -> bool:
        return self.dtype is torch.float32


@dataclass(frozen=True)
class NodeFacts:
    """What is known of one node of a captured graph before anything is decided.

    `reads` names the nodes whose float32 tensors it computes on (not those of which it only
    reads the shape); `storage` names the node that made the memory its result lives in, itself
    unless the result is a view of or was written into another value.
    """

    name: str
    kind: str
    op: str | None
    color: Color | None
    group: str | None
    reads: tuple[str, ...]
    tensors: tuple[TensorFacts, ...]
    storage: str
    is_view: bool = False
    bounded: bool = False
    is_weight: bool = False
    module_path: str = ""
    source: str = ""

    @property
    def float32_numel(self) -> int:
        return sum(t.numel for t in self.tensors if t.is_float32)


@dataclass(frozen=True)
class Paint:
    """The colour of a node, the rule that gave it, and the list entry or node responsible."""

    color: Color
    rule: str
    because: str = ""


@dataclass(frozen=True)
class Cast:
    """One conversion of one value, shared by all of `readers`. `bytes` counts read and written."""

    value: str
    dtype: torch.dtype
    readers: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Every decision for one graph.

    `low` names the nodes that compute in `dtype`; every other node computes as captured.
    `bodies` holds the plans of the graphs inside higher-order operators, by attribute name.
    `fallback` says why a graph runs as captured although it was to be converted.
    """

    dtype: torch.dtype
    facts: Mapping[str, NodeFacts]
    paints: Mapping[str, Paint]
    low: frozenset[str]
    casts: tuple[Cast, ...]
    bodies: Mapping[str, Plan] = field(default_factory=dict)
    fallback: str | None = None

    @property
    def cast_bytes(self) -> int:
        return sum(c.bytes for c in self.casts) + sum(b.cast_bytes for b in self.bodies.values())
