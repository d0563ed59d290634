"""Verify: check that an emitted graph keeps every promise, or raise.

The checks stand in one table. Each takes what was captured and what was emitted and yields the
complaints it has; the first complaint is raised with the check's name, the node and the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from amp_graph.capture.aten import (
    CAST,
    CLAMP,
    SET_GRAD_ENABLED,
    storages,
    tensors_of,
    written_operands,
)
from amp_graph.capture.grad_modes import recorded_nodes
from amp_graph.errors import VerifyError
from amp_graph.ir import Color, Plan, takes_either

ADDED = (CAST, CLAMP, SET_GRAD_ENABLED)  # what emit writes besides the captured nodes
Check = Callable[[fx.GraphModule, fx.GraphModule, Plan], Iterator[str]]


def verify(captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan) -> None:
    """Raise VerifyError if the emitted graph breaks a promise; see `CHECKS`."""
    for check in CHECKS:
        for complaint in check(captured, emitted, plan):
            raise VerifyError(f"{check.__name__.replace('_', ' ')}: {complaint}")


def _nodes(module: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in module.graph.nodes}


def every_node_is_emitted(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    ours = [n for n in emitted.graph.nodes if n.target not in ADDED or n.name in plan.facts]
    theirs = list(captured.graph.nodes)
    if len(ours) != len(theirs):
        yield f"{len(theirs)} nodes were captured and {len(ours)} emitted"
    for new, old in zip(ours, theirs, strict=False):
        if new.target != old.target or new.op != old.op:
            yield f"'{old.name}' became '{new.name}' ({new.target})"


def graph_is_well_formed(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    try:
        emitted.graph.lint()
    except RuntimeError as error:
        yield str(error)


def operands_are_the_captured_ones(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """Every operator gets the values it got when captured, as they are or cast, and the same
    numbers and flags, a dtype apart."""
    ours = _nodes(emitted)
    for old in captured.graph.nodes:
        theirs, now = _spelled(old, plan), _spelled(ours[old.name], plan)
        if theirs != now:
            yield f"'{old.name}' got {theirs} and gets {now}"


def _spelled(node: fx.Node, plan: Plan) -> list[str]:
    kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    return [
        _origin(arg, plan) if isinstance(arg, fx.Node) else repr(arg)
        for arg in tree_leaves((node.args, kwargs))
        if not isinstance(arg, torch.dtype)
    ]


def casts_are_fresh(captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan) -> Iterator[str]:
    """No cast is read after the memory it was made from was written."""
    made: dict[fx.Node, int] = {}
    written: dict[Any, int] = {}
    for position, node in enumerate(emitted.graph.nodes):
        made[node] = position
        for cast in node.all_input_nodes:
            if cast.name in plan.facts:
                continue
            source = cast.all_input_nodes[0]
            if any(written.get(key, -1) > made[cast] for key in storages(source)):
                yield f"'{node.name}' reads '{cast.name}' from before '{source}' was written"
        for target in written_operands(emitted, node):
            written.update(dict.fromkeys(storages(target), position))


def autograd_records_as_before(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """What it recorded when captured it records now, and no more; and all casts, if anything."""
    was, now = recorded_nodes(captured.graph), recorded_nodes(emitted.graph)
    for node in emitted.graph.find_nodes(op="call_function", target=CAST):
        if was and node.name not in plan.facts and node.name not in now:
            yield f"'{node.name}' is not recorded by autograd"
    for name in plan.facts:
        if (name in was) != (name in now):
            yield f"'{name}' is recorded by autograd in one of the graphs"


def low_nodes_are_low(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """What the plan says is low reads or returns the low precision."""
    for new in emitted.graph.nodes:
        if new.name in plan.low and plan.facts[new.name].op != "getitem":
            dtypes = [d for n in (new, *new.all_input_nodes) for d in _float_dtypes(n)]
            if dtypes and plan.dtype not in dtypes:
                yield f"'{new.name}' is to be low and is not"


def outputs_keep_their_dtype(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    for new, old in zip(_outputs(emitted), _outputs(captured), strict=True):
        ours, theirs = [t.dtype for t in tensors_of(new)], [t.dtype for t in tensors_of(old)]
        if ours != theirs:
            yield f"'{old.name}' was {theirs} and is {ours}"


def outputs_share_memory_as_before(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    if _sharing(captured) != _sharing(emitted):
        yield "outputs that shared memory with one another or an input no longer do"


def _sharing(module: fx.GraphModule) -> list[list[int]]:
    """For each output, which of all inputs and outputs its memory is shared with."""
    inputs = [n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")]
    keys = [frozenset(storages(n)) for n in [*inputs, *_outputs(module)]]
    return [
        [i for i, other in enumerate(keys) if key & other] for key in keys[len(inputs) :] if key
    ]


def writes_reach_their_memory(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """An operator that wrote into a value still does, not into a cast of it."""
    ours = _nodes(emitted)
    for old in captured.graph.nodes:
        targets = written_operands(captured, old), written_operands(emitted, ours[old.name])
        for was, now in zip(*targets, strict=True):
            is_owner_cast = was.name in plan.facts and plan.facts[was.name].memory == was.name
            if now.name != was.name and not (is_owner_cast and _stored_as(plan, was.name)):
                yield f"'{old.name}' would write into '{now.name}' instead of '{was.name}'"


def _stored_as(plan: Plan, name: str) -> bool:
    """Whether a result is cast right where it is made, as its memory."""
    return any(c.value == name and name in c.readers for c in plan.casts)


def colors_are_honoured(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """Denied and kept operators read what they read when captured, unless they take either."""
    ours = _nodes(emitted)
    for old in captured.graph.nodes:
        color = plan.paints[old.name].color
        if color not in (Color.DENY, Color.KEEP) or old.name in plan.low:
            continue
        if plan.facts[old.name].op == "getitem":
            continue
        for was, now in zip(old.all_input_nodes, ours[old.name].all_input_nodes, strict=False):
            if takes_either(plan.facts, plan.paints, was.name, old.name):
                continue
            if _float_dtypes(was) != _float_dtypes(now) and was.name in plan.facts[old.name].reads:
                yield f"'{old.name}' is {color.value} but reads {now.name} in {_float_dtypes(now)}"


def captured_precision_is_kept(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """What is not low returns what it returned when captured."""
    ours = _nodes(emitted)
    for old in captured.graph.nodes:
        facts = plan.facts[old.name]
        if old.name in plan.low or facts.op == "getitem" or (facts.written and not facts.external):
            continue
        if _float_dtypes(old) != _float_dtypes(ours[old.name]):
            yield f"'{old.name}' is not low but returns {_float_dtypes(ours[old.name])}"


def _float_dtypes(node: fx.Node) -> list[torch.dtype]:
    return [t.dtype for t in tensors_of(node) if t.dtype.is_floating_point]


def one_cast_per_value(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    """Unless the value was written in between."""
    seen: set[tuple[str, torch.dtype]] = set()
    for cast in plan.casts:
        key = (cast.value, cast.dtype)
        if key in seen and not plan.facts[cast.value].written:
            yield f"'{cast.value}' is cast to {cast.dtype} twice"
        seen.add(key)


def no_cast_of_a_cast(
    captured: fx.GraphModule, emitted: fx.GraphModule, plan: Plan
) -> Iterator[str]:
    casts = {n for n in emitted.graph.nodes if n.target is CAST and n.name not in plan.facts}
    for node in casts:
        source = node.args[0]
        if source in casts and not plan.facts[_origin(node, plan)].written:
            yield f"'{node.name}' casts '{source}', which is a cast"


def _origin(node: fx.Node, plan: Plan) -> str:
    while node.name not in plan.facts:
        node = node.args[0]  # type: ignore[assignment]
    return node.name


def _outputs(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "output" for n in n.all_input_nodes]


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
