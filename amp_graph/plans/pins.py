"""Pins: the decisions of a saved plan, found for a captured graph and put on its nodes.

    saved:    linear allow, gelu infer -> edited to deny, linear_1 allow
    captured: the lists say gelu infer
    painted:  linear allow, gelu deny "saved in the plan", linear_1 allow

A captured graph is found by its fingerprint: operators, operands by name, dtypes, shapes and
module paths. A graph of other shapes, or of the other of train and eval mode, is found by its
computation: the same operators on float32 tensors, in the same order, on each other's results, in
the same modules. Anything else is an error that names the first node that differs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from amp_graph.errors import PlanError
from amp_graph.ir import Color, NodeFacts, Paint, Plan

EDITED = "saved in the plan"


@dataclass(frozen=True)
class Saved:
    """The plans that a model is to follow and, for messages, where they came from and the version
    of torch that they were saved under, if it is known."""

    plans: tuple[Plan, ...]
    origin: str = "the plan given"
    torch: str = ""

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(map(fingerprint, self.plans))


@dataclass(frozen=True)
class Pins:
    """What a saved plan decided, by the names of the captured nodes.

    exact: the captured graph is the saved one, so that every edit has to be possible.
    """

    paints: Mapping[str, Paint]
    exact: bool
    origin: str
    bodies: Mapping[str, Pins] = field(default_factory=dict)


def fingerprint(plan: Plan) -> str:
    """A digest of the graph that a plan is for, whatever was decided for it."""
    text = json.dumps(_description(plan), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def pins_for(saved: Saved, captured: Plan) -> Pins:
    """The decisions for a captured graph, given as a plan with nothing decided.

    Raises PlanError if no saved plan is for this graph, or several that differ are.
    """
    mark = fingerprint(captured)
    marks = enumerate(saved.fingerprints)
    exact = [(i, saved.plans[i]) for i, its_mark in marks if its_mark == mark]
    if exact:
        _check_agreement(exact, saved.origin)
        return _pins(exact[0][1], captured, saved.origin, exact=True)
    for plan in saved.plans:
        if _same_computation(plan, captured):
            return _pins(plan, captured, saved.origin, exact=False)
    raise PlanError(_no_plan(saved, captured))


def pinned(fresh: Mapping[str, Paint], pins: Pins) -> dict[str, Paint]:
    """The saved colours with their reasons; one edited by hand says what the lists would have
    said. `fresh` is what they say without the plan."""
    found = {}
    for name, ours in fresh.items():
        saved = pins.paints.get(name)
        if saved is None or Color.KEEP in (saved.color, ours.color):
            continue
        if saved.color is ours.color:
            found[name] = ours
        elif (saved.rule, saved.because) == (ours.rule, ours.because):
            because = f"without it {ours.color.value}, {ours.in_brief}"
            found[name] = Paint(saved.color, EDITED, because)
        else:
            found[name] = Paint(saved.color, saved.rule, saved.because)
    return found


def check_honoured(painted: Mapping[str, Paint], fresh: Mapping[str, Paint], pins: Pins) -> None:
    """Raises PlanError if a colour that was edited in the saved plan did not come about."""
    for name, saved in pins.paints.items():
        now = painted[name]
        if pins.exact and saved.color is not now.color and saved.color is not fresh[name].color:
            raise PlanError(
                f"{pins.origin}: '{name}' cannot be {saved.color.value}, it is "
                f"{now.color.value} ({now.in_brief}). Set it back to {fresh[name].color.value}."
            )


def _check_agreement(plans: Sequence[tuple[int, Plan]], origin: str) -> None:
    """One graph may have been captured twice, with gradients and without."""
    (first, plan), *others = plans
    colors = _colors(plan)
    for other, again in others:
        for name, color in _colors(again).items():
            if name in colors and colors[name] is not color:
                raise PlanError(
                    f"{origin}: plans {first} and {other} are for the same graph, and '{name}' is "
                    f"{colors[name].value} in one and {color.value} in the other. Make them agree, "
                    "or take one of the two out."
                )


def _colors(plan: Plan, body: str = "") -> dict[str, Color]:
    found = {f"{body}{name}": paint.color for name, paint in plan.paints.items()}
    for name, inner in plan.bodies.items():
        found |= _colors(inner, f"{body}{name}/")
    return found


def _pins(plan: Plan, captured: Plan, origin: str, exact: bool) -> Pins:
    if exact:
        paints = dict(plan.paints)
    else:
        names = zip(_deciding(plan), _deciding(captured), strict=True)
        paints = {ours: plan.paints[theirs] for theirs, ours in names if theirs in plan.paints}
    bodies = {
        name: _pins(body, captured.bodies[name], origin, exact)
        for name, body in plan.bodies.items()
    }
    return Pins(paints, exact, origin, bodies)


def _deciding(plan: Plan) -> dict[str, NodeFacts]:
    """The nodes for which there is something to decide."""
    return {name: f for name, f in plan.facts.items() if not f.fixed}


def _same_computation(plan: Plan, captured: Plan) -> bool:
    if plan.bodies.keys() != captured.bodies.keys() or not plan.facts:
        return False
    if _computation(plan) != _computation(captured):
        return False
    return all(_same_computation(b, captured.bodies[n]) for n, b in plan.bodies.items())


def _computation(plan: Plan) -> list[Any]:
    nodes = _deciding(plan)
    index = {name: i for i, name in enumerate(nodes)}
    return [
        (f.op, f.module_path, [index[r] for r in f.reads if r in index]) for f in nodes.values()
    ]


def _description(plan: Plan) -> list[Any]:
    rename = _symbols(plan)
    nodes = [_node(f, rename) for f in plan.facts.values()]
    return [nodes, {name: _description(body) for name, body in sorted(plan.bodies.items())}]


def _node(f: NodeFacts, rename: Mapping[str, str]) -> dict[str, Any]:
    def size(s: int | str) -> int | str:
        return s if isinstance(s, int) else re.sub(r"\b[su]\d+\b", lambda m: rename[m[0]], s)

    return {
        "name": f.name,
        "operator": f.op,
        "operands": list(f.operands),
        "results": [[str(t.dtype), [size(s) for s in t.shape]] for t in f.tensors],
        "module": f.module_path,
    }


def _symbols(plan: Plan) -> dict[str, str]:
    """Symbolic sizes by the order in which they appear: torch numbers them as it likes."""
    sizes = (str(s) for f in plan.facts.values() for t in f.tensors for s in t.shape)
    symbols = dict.fromkeys(s for size in sizes for s in re.findall(r"\b[su]\d+\b", size))
    return {symbol: f"size{i}" for i, symbol in enumerate(symbols)}


def _no_plan(saved: Saved, captured: Plan) -> str:
    if not saved.plans:
        return f"{saved.origin}: holds no plan"
    nearest = max(saved.plans, key=lambda plan: _common(plan, captured))
    here = str(torch.__version__)
    versions = f"It was saved under torch {saved.torch}; this is {here}. "
    return (
        f"{saved.origin}: none of its plans is for this graph. {_difference(nearest, captured)} "
        f"{versions if saved.torch not in ('', here) else ''}"
        "Save the plans again after the model ran in this way, or convert without a plan."
    )


def _common(plan: Plan, captured: Plan) -> int:
    """How many nodes there are up to the first that differs."""
    pairs = zip(_computation(plan), _computation(captured), strict=False)
    return next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), len(plan.facts))


def _difference(plan: Plan, captured: Plan) -> str:
    pairs = zip(_deciding(plan).values(), _deciding(captured).values(), strict=False)
    same = zip(_computation(plan), _computation(captured), strict=False)
    for (theirs, ours), (then, now) in zip(pairs, same, strict=True):
        if then != now:
            where = f" at {ours.source}" if ours.source else ""
            was, now_is = _spelled(theirs, ours)
            return f"First difference: node '{ours.name}'{where} {now_is}; it {was}."
    return _surplus(list(_deciding(plan)), list(_deciding(captured)))


def _spelled(theirs: NodeFacts, ours: NodeFacts) -> tuple[str, str]:
    """What two nodes differ in, in words."""
    if theirs.op != ours.op:
        return f"was {theirs.op}", f"is {ours.op}"
    if theirs.module_path != ours.module_path:
        return f"was in module '{theirs.module_path}'", f"is in module '{ours.module_path}'"
    return f"computed on {', '.join(theirs.reads)}", f"computes on {', '.join(ours.reads)}"


def _surplus(theirs: Sequence[str], ours: Sequence[str]) -> str:
    if len(ours) > len(theirs):
        return f"First difference: node '{ours[len(theirs)]}' is new."
    if len(theirs) > len(ours):
        return f"First difference: node '{theirs[len(ours)]}' is gone."
    return "The graphs inside its higher-order operators differ."
