"""Verify: check that an emitted graph keeps every promise, or raise.

The checks stand in one table. Each takes what was captured and what was emitted and yields the
complaints it has; the first complaint is raised with the check's name, the node and the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from amp_graph.errors import VerifyError
from amp_graph.flow import saturated, takes_either
from amp_graph.graphs.aten import (
    ADD,
    CAST,
    CLAMP,
    SET_GRAD_ENABLED,
    storages,
    tensors_of,
    written_operands,
)
from amp_graph.graphs.grad_modes import recorded_nodes
from amp_graph.ir import Cast, Color, NodeFacts, Plan

ADDED = (CAST, CLAMP, ADD, SET_GRAD_ENABLED)  # what emit writes besides the captured nodes


class Pair(NamedTuple):
    """A captured node, the node emitted for it, and what is known and was decided of it."""

    old: fx.Node
    new: fx.Node
    facts: NodeFacts
    is_low: bool


@dataclass(frozen=True)
class Emission:
    """The subject of all checks: a captured graph, the emitted graph, and the plan that it follows.

    The first two checks make sure that `pairs` are pairs; the others build on it.
    """

    captured: fx.GraphModule
    emitted: fx.GraphModule
    plan: Plan

    @cached_property
    def added(self) -> frozenset[fx.Node]:
        """The emitted nodes that were not captured."""
        possible = (n for n in self.emitted.graph.nodes if n.target in ADDED)
        return frozenset(n for n in possible if n.name not in self.plan.facts)

    @cached_property
    def captured_again(self) -> list[fx.Node]:
        """The emitted nodes that were captured."""
        return [n for n in self.emitted.graph.nodes if n not in self.added]

    @cached_property
    def pairs(self) -> list[Pair]:
        low, known = self.plan.low, self.plan.facts.values()
        together = zip(self.captured.graph.nodes, self.captured_again, known, strict=False)
        return [Pair(old, new, f, f.name in low) for old, new, f in together]

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the emitted form of the captured node that a node is a cast of, or the node
        itself."""
        while node in self.added:
            node = node.args[0]  # type: ignore[assignment]
        return node


Check = Callable[[Emission], Iterator[str]]


def verify(captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan) -> None:
    """Raise VerifyError if the emitted graph breaks a promise; see `CHECKS`."""
    emission = Emission(captured, emitted, plan)
    for check in CHECKS:
        for complaint in check(emission):
            raise VerifyError(f"{check.__name__.replace('_', ' ')}: {complaint}")


def graph_is_well_formed(of: Emission) -> Iterator[str]:
    try:
        of.emitted.graph.lint()
    except RuntimeError as error:
        yield str(error)


def every_node_is_emitted(of: Emission) -> Iterator[str]:
    captured = len(of.captured.graph.nodes)
    if not captured == len(of.captured_again) == len(of.plan.facts):
        yield f"{captured} nodes were captured and {len(of.captured_again)} emitted"
    for old, new, f, _ in of.pairs:
        if not (old.name == new.name == f.name) or new.target != old.target or new.op != old.op:
            yield f"'{old.name}' became '{new.name}' ({new.target})"


def operands_are_the_captured_ones(of: Emission) -> Iterator[str]:
    """Every operator gets the values it got when captured, as they are or cast, and the same
    numbers and flags, apart from dtypes and saturated numbers."""
    for old, new, _, is_low in of.pairs:
        theirs, now = _spelled(old, of, is_low), _spelled(new, of, is_low)
        if theirs != now:
            yield f"'{old.name}' got {theirs} and gets {now}"


def _spelled(node: fx.Node, of: Emission, is_low: bool) -> list[str]:
    kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    return [
        of.origin(arg).name
        if isinstance(arg, fx.Node)
        else repr(saturated(arg, of.plan.dtype) if is_low else arg)
        for arg in tree_leaves((node.args, kwargs))
        if not isinstance(arg, torch.dtype)
    ]


def casts_are_fresh(of: Emission) -> Iterator[str]:
    """No cast is read after the memory it was made from was written."""
    made: dict[fx.Node, int] = {}
    written: dict[Any, int] = {}
    for position, node in enumerate(of.emitted.graph.nodes):
        made[node] = position
        for cast in of.added.intersection(node.all_input_nodes) if written else ():
            source = cast.all_input_nodes[0]
            if any(written.get(key, -1) > made[cast] for key in storages(source)):
                yield f"'{node.name}' reads '{cast.name}' from before '{source}' was written"
        for target in written_operands(of.emitted, node):
            written.update(dict.fromkeys(storages(target), position))


def autograd_records_as_before(of: Emission) -> Iterator[str]:
    """Autograd records the operators that it recorded when captured, no others, and all casts or
    none."""
    was, now = recorded_nodes(of.captured.graph), recorded_nodes(of.emitted.graph)
    for node in of.added:
        if was and node.target is CAST and node not in now:
            yield f"'{node.name}' is not recorded by autograd"
    for old, new, _, _ in of.pairs:
        if (old in was) != (new in now):
            yield f"'{old.name}' is recorded by autograd in one of the graphs"


def low_nodes_are_low(of: Emission) -> Iterator[str]:
    """A node that is low in the plan reads or returns the low precision, and computes on no float32
    operand that it does not take."""
    facts, paints = of.plan.facts, of.plan.paints
    for old, new, f, is_low in of.pairs:
        if not is_low or f.op == "getitem":
            continue
        dtypes = [d for n in (new, *new.all_input_nodes) for d in _float_dtypes(n)]
        if dtypes and of.plan.dtype not in dtypes:
            yield f"'{new.name}' is to be low and is not"
        for was, now in zip(old.all_input_nodes, new.all_input_nodes, strict=False):
            is_wide = was.name in f.reads and torch.float32 in _float_dtypes(now)
            if is_wide and not takes_either(facts, paints, was.name, f.name, f.reads, is_low=True):
                yield f"'{new.name}' is low but reads {now.name} in float32"


def outputs_keep_their_dtype(of: Emission) -> Iterator[str]:
    for new, old in zip(_outputs(of.emitted), _outputs(of.captured), strict=True):
        ours, theirs = [t.dtype for t in tensors_of(new)], [t.dtype for t in tensors_of(old)]
        if ours != theirs:
            yield f"'{old.name}' was {theirs} and is {ours}"


def outputs_share_memory_as_before(of: Emission) -> Iterator[str]:
    if _sharing(of.captured) != _sharing(of.emitted):
        yield "outputs that shared memory with one another or an input no longer do"


def _sharing(module: fx.GraphModule) -> set[tuple[int, ...]]:
    """Map each memory that an output has to the numbers of the inputs and outputs that have it."""
    inputs = [n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")]
    owners: dict[int, list[int]] = {}
    for i, node in enumerate([*inputs, *_outputs(module)]):
        for memory in dict.fromkeys(storages(node)):
            owners.setdefault(memory, []).append(i)
    return {tuple(numbers) for numbers in owners.values() if numbers[-1] >= len(inputs)}


def writes_reach_their_memory(of: Emission) -> Iterator[str]:
    """An operator that wrote into a value still does, not into a cast of it."""
    facts = of.plan.facts
    for old, new, _, _ in of.pairs:
        targets = written_operands(of.captured, old), written_operands(of.emitted, new)
        for was, now in zip(*targets, strict=True):
            is_same = now.name == was.name
            if not is_same and (facts[was.name].is_view or not _stored_as(of.plan, was.name)):
                yield f"'{old.name}' would write into '{now.name}' instead of '{was.name}'"


def _stored_as(plan: Plan, name: str) -> bool:
    """Whether a result is cast right where it is made, as its memory."""
    return any(c.value == name and name in c.readers for c in plan.casts)


def colors_are_honoured(of: Emission) -> Iterator[str]:
    """Denied and kept operators read what they read when captured, unless they take either."""
    facts, paints = of.plan.facts, of.plan.paints
    for old, new, f, is_low in of.pairs:
        color = paints[f.name].color
        if color not in (Color.DENY, Color.KEEP) or is_low or f.op == "getitem":
            continue
        for was, now in zip(old.all_input_nodes, new.all_input_nodes, strict=False):
            if _float_dtypes(was) == _float_dtypes(now) or was.name not in f.reads:
                continue
            if not takes_either(facts, paints, was.name, f.name, f.reads):
                yield f"'{f.name}' is {color.value} but reads {now.name} in {_float_dtypes(now)}"


def captured_precision_is_kept(of: Emission) -> Iterator[str]:
    """A node that is not low returns what it returned when captured."""
    for old, new, f, is_low in of.pairs:
        if is_low or f.op == "getitem" or (f.written and not f.external):
            continue
        if _float_dtypes(old) != _float_dtypes(new):
            yield f"'{old.name}' is not low but returns {_float_dtypes(new)}"


def _float_dtypes(node: fx.Node) -> list[torch.dtype]:
    return [t.dtype for t in tensors_of(node) if t.dtype.is_floating_point]


def one_cast_per_value(of: Emission) -> Iterator[str]:
    """A value is cast once per dtype, unless it was written in between, or the cast before is
    full."""
    last: dict[tuple[str, torch.dtype], Cast] = {}
    for cast in of.plan.casts:
        key = (cast.value, cast.dtype)
        if key in last and not (of.plan.facts[cast.value].written or last[key].is_full):
            yield f"'{cast.value}' is cast to {cast.dtype} twice"
        last[key] = cast


def no_cast_of_a_cast(of: Emission) -> Iterator[str]:
    casts = {n for n in of.added if n.target is CAST}
    for node in casts:
        source = node.args[0]
        if source in casts and not of.plan.facts[of.origin(node).name].written:
            yield f"'{node.name}' casts '{source}', which is a cast"


def _outputs(module: fx.GraphModule) -> list[fx.Node]:
    return [*module.graph.output_node().all_input_nodes]


CHECKS: tuple[Check, ...] = (
    graph_is_well_formed,
    every_node_is_emitted,
    operands_are_the_captured_ones,
    casts_are_fresh,
    autograd_records_as_before,
    low_nodes_are_low,
    outputs_keep_their_dtype,
    outputs_share_memory_as_before,
    writes_reach_their_memory,
    colors_are_honoured,
    captured_precision_is_kept,
    one_cast_per_value,
    no_cast_of_a_cast,
)
