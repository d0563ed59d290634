"""The nouns of the compiler: plain, frozen data that the passes hand to one another.

Nothing here runs a model.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from amp_graph.dtypes import dtype_name
from amp_graph.levels import Level

READERS = 16  # of one low value: so many gradients add up with about one rounding of each


class Color(enum.Enum):
    """The list that an operator is on and, after `paint`, the decision for a node.

    A node painted ALLOW computes in low precision, DENY in float32. INFER and CLEAR nodes are free:
    `place_casts` chooses. KEEP runs exactly as captured, on operands of the captured dtypes: there
    is nothing to convert, or the model's own code fixed the precision.
    """

    ALLOW = "allow"
    DENY = "deny"
    INFER = "infer"
    CLEAR = "clear"
    KEEP = "keep"


FREE = (Color.INFER, Color.CLEAR)


COLORS = {color.value: color for color in Color if color is not Color.KEEP}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor that a node returns. `numel` is a size hint where the shape is symbolic."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    device: str
    numel: int

    @property
    def is_sized(self) -> bool:
        """Whether the size is known, rather than made up because it depends on data (`u0`)."""
        return not any(re.search(r"\bu\d+\b", str(size)) for size in self.shape)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts about one node of a captured graph before anything is decided.

    From the operator's list entry, as `Listing` explains them: color (None: on no list), group,
    bounded, promotes, orders, saturates, reads_phase, exact, widens. Otherwise:

    operands: all nodes it takes. `reads`: those whose float32 tensors it computes on. `positions`:
        of these, the ones that say where something is: they become integers, or places to sample
        at.
    tensors: the tensors it returns.
    storage: the level from which on its float32 tensors may be low, as its kernel computes in
        float32 inside; None: never.
    like: for an `exact` node, the value whose dtype it was made in, if the model's code names none.
    scalars: the numbers in its arithmetic. `unknown`: nodes that hold others, known only in a call.
    terms: for a product of matrices, how many products of two numbers are added up per element.
    strides: for a convolution, how far apart its windows are.
    sums: how many numbers its kernel, or that of a gradient, may add up in their precision.
    recorded: whether autograd records it. Not compared: a first layer, without, is like the others.
    memory: the node that first held the storage of its result: itself, unless the result is a view
        of another value or was written in place.
    written: whether some node of the graph writes into that storage.
    writes: the memories that this node itself writes into, or may.
    external: whether that storage is an input's, a parameter's or a buffer's.
    user_cast: whether it is the user's cast of float32 to float32: stay precise from here.
    asked: whether it is asked for float32 (`softmax(x, -1, dtype=torch.float32)`).
    fixed: why the node must run as captured, or "".
    called: the path of a parameter or buffer ("head.fc.weight"), or the argument of the call.
    source, code: the place and the text of the user's line that it came from.
    """

    name: str
    op: str
    color: Color | None = None
    group: str = ""
    bounded: bool = False
    storage: Level | None = None
    promotes: bool = False
    orders: bool = False
    saturates: bool = False
    reads_phase: bool = False
    exact: bool = False
    widens: bool = False
    reads: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    like: str = ""
    operands: tuple[str, ...] = ()
    tensors: tuple[TensorFacts, ...] = ()
    memory: str = ""
    written: bool = False
    writes: tuple[str, ...] = ()
    external: bool = False
    is_parameter: bool = False
    is_buffer: bool = False
    user_cast: bool = False
    asked: bool = False
    recorded: bool = field(default=False, compare=False)
    scalars: tuple[float, ...] = ()
    terms: int | None = None
    strides: tuple[int, ...] = ()
    sums: int = 1
    fixed: str = ""
    called: str = ""
    module_path: str = ""
    source: str = ""
    code: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def is_view(self) -> bool:
        return self.memory != self.name

    @property
    def has_precision(self) -> bool:
        """Whether it is an operator on float32 tensors, and not one that runs a body."""
        is_operator = "." in self.op or bool(self.group)  # higher-order ones print without a dot
        return is_operator and bool(self.reads or self.numel)

    @property
    def numel(self) -> int:
        """Elements of the float32 tensors that it returns."""
        return sum(t.numel for t in self.tensors if t.dtype is torch.float32)

    @property
    def is_weight(self) -> bool:
        """Whether its casts are lifted out of the graph: it is a parameter that is only read."""
        return self.is_parameter and not self.written

    @property
    def label(self) -> str:
        """The name to show."""
        return self.called or self.name

    @property
    def is_scalar(self) -> bool:
        return len(self.tensors) == 1 and self.tensors[0].shape == ()

    @property
    def is_empty(self) -> bool:
        """Whether it returns no elements, whatever the inputs (the cache before the first
        token)."""
        return bool(self.tensors) and all(0 in t.shape for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Paint:
    """The colour of a node, the rule that gave it, and the list entry or node responsible.

    wide: its values still hold full float32, so a float32 reader must not get them rounded.
    shares: an output of the graph must go on sharing its memory, which therefore is float32.
    huge: its values may be finite and beyond the low precision's range (a mask's -3.4e38).
    """

    color: Color
    rule: str
    because: str = ""
    shares: bool = False
    wide: bool = False
    huge: bool = False

    @property
    def in_brief(self) -> str:
        """The rule and what was responsible, in a few words."""
        return f"{self.rule}: {self.because}" if self.because else self.rule


@dataclass(frozen=True, slots=True)
class Cast:
    """A conversion of one value, shared by all of `readers`. A weight's runs outside of the graph.

    bytes: how many it reads and writes.
    saturate: finite numbers beyond the low precision's range become its largest, not infinity.
    """

    value: str
    dtype: torch.dtype
    readers: tuple[str, ...]
    bytes: int
    saturate: bool = False
    is_weight: bool = False

    @property
    def is_full(self) -> bool:
        """Whether one more gradient would be lost among those of its readers."""
        return len(self.readers) >= READERS and self.dtype is not torch.float32


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Every decision for one graph.

    low: the nodes that compute in `dtype`; every other node computes as captured.
    bodies: the plans of the graphs inside higher-order operators, by attribute name.
    fallback: why the graph is not converted; it runs as captured or, with `autocast`, under
        `torch.autocast` in `dtype`.
    uncompiled: why it runs operator by operator although it was to be compiled.
    """

    dtype: torch.dtype
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    paints: Mapping[str, Paint] = field(default_factory=dict)
    low: frozenset[str] = frozenset()
    casts: tuple[Cast, ...] = ()
    bodies: Mapping[str, Plan] = field(default_factory=dict)
    fallback: str | None = None
    autocast: bool = False
    uncompiled: str | None = None

    def __repr__(self) -> str:
        how = f" {self.otherwise}" if self.otherwise else ""
        counts = f"{len(self.facts)} nodes, {len(self.low)} low, {len(self.casts)} casts"
        return f"<Plan in {dtype_name(self.dtype)}: {counts}{how}>"

    def precision(self, name: str) -> str:
        """Return the precision in which an operator computes, by the operator's name."""
        return dtype_name(self.dtype) if name in self.low else "float32"

    def as_captured(self, reason: str) -> Plan:
        """Return the plan of the same graph run as captured, for a reason."""
        return replace(self._without_low(), fallback=reason)

    def _without_low(self) -> Plan:
        bodies = {name: body._without_low() for name, body in self.bodies.items()}
        return replace(self, low=frozenset(), casts=(), bodies=bodies)

    def parts(self) -> Iterator[Plan]:
        """Yield the plan itself, and the plans of all bodies inside it."""
        yield self
        for body in self.bodies.values():
            yield from body.parts()

    @property
    def converts(self) -> bool:
        """Whether anything of the graph runs in low precision."""
        return self.autocast or self.has_low

    @property
    def has_low(self) -> bool:
        """Whether any node of the graph or of its bodies computes in low precision."""
        return any(part.low for part in self.parts())

    @property
    def otherwise(self) -> str | None:
        """How a graph that is not converted runs, and why; None if it is."""
        if self.fallback is None:
            return None
        not_under_autocast = "as captured" if self.facts else "in float32"
        return f"runs {'under autocast' if self.autocast else not_under_autocast}: {self.fallback}"

    @property
    def operators(self) -> int:
        """Operators on float32 tensors in the graph and in its bodies."""
        return sum(f.has_precision for part in self.parts() for f in part.facts.values())

    @property
    def operators_low(self) -> int:
        """How many of the `operators` compute in low precision."""
        facts = ((part.low, f) for part in self.parts() for f in part.facts.values())
        return sum(f.has_precision and f.name in low for low, f in facts)

    @property
    def casts_inside(self) -> tuple[Cast, ...]:
        """The casts that run in the graph and in its bodies: all but those of weights, which are
        lifted out of the graph, though not out of its bodies."""
        bodies = (c for body in self.bodies.values() for part in body.parts() for c in part.casts)
        return (*(c for c in self.casts if not c.is_weight), *bodies)

    @property
    def unsized_casts(self) -> tuple[Cast, ...]:
        """The casts inside whose bytes are made up, as the size of their value depends on data."""
        found = ((part.facts.get(c.value), c) for part in self.parts() for c in part.casts)
        return tuple(c for f, c in found if f and not all(t.is_sized for t in f.tensors))

    @property
    def cast_bytes(self) -> int:
        """Bytes read and written by the casts in the graph and in its bodies; none for those of
        unknown size."""
        made_up = sum(c.bytes for c in self.unsized_casts)
        return sum(c.bytes for c in self.casts_inside) - made_up

    @property
    def weight_bytes(self) -> int:
        """Bytes read and written to bring all low-precision weights up to date."""
        return sum(c.bytes for c in self.casts if c.is_weight)
