"""Pins: the decisions of a saved plan, found for a captured graph and put on its nodes.

    saved:    linear allow, gelu infer -> edited to deny, linear_1 allow
    captured: the lists say gelu infer
    painted:  linear allow, gelu deny "saved in the plan", linear_1 allow

A plan is found for a captured graph by its fingerprint, else by its computation (`matching`).
Anything else is an error that names the first node that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from amp_graph.errors import PlanError, warn
from amp_graph.ir import Color, NodeFacts, Paint, Plan
from amp_graph.plans.matching import (
    common_nodes,
    computing,
    fingerprint,
    first_difference,
    is_same_computation,
)
from amp_graph.rules import Rule


@dataclass(frozen=True)
class Saved:
    """The plans that a model is to follow.

    origin: where they came from, for messages.
    torch: the version of torch that they were saved under; "" if unknown.
    """

    plans: tuple[Plan, ...]
    origin: str = "the plan given"
    torch: str = ""

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(map(fingerprint, self.plans))


@dataclass(frozen=True)
class Pins:
    """The decisions of a saved plan, by the names of the captured nodes.

    exact: whether the captured graph is the saved one, so that every edit has to be possible.
    number: the plan's, among those saved.
    others: the decisions of other plans for the same computation, by their numbers.
    unplaced: decisions for nodes that hand numbers on, which may be missing at other sizes; not
        followed.
    is_trial: whether a search asks, which tells nobody what was not possible.
    """

    paints: Mapping[str, Paint]
    exact: bool
    origin: str
    bodies: Mapping[str, Pins] = field(default_factory=dict)
    number: int = 0
    others: Mapping[int, Mapping[str, Paint]] = field(default_factory=dict)
    unplaced: Mapping[str, Paint] = field(default_factory=dict)
    is_trial: bool = False


def has_plan(saved: Saved, captured: Plan) -> bool:
    """Whether any saved plan is for a captured graph, given as a plan with nothing decided."""
    return bool(_plans_for(saved, captured)[0])


def pins_for(saved: Saved, captured: Plan) -> Pins:
    """Return the decisions for a captured graph, given as a plan with nothing decided.

    Raises PlanError if no saved plan is for this graph, or several that differ are.
    """
    found, are_exact = _plans_for(saved, captured)
    if not found:
        raise PlanError(_no_plan(saved, captured))
    if not are_exact:
        return _pins(found, captured, saved.origin)
    _check_agreement([*found.items()], saved.origin)
    return _exact_pins(next(iter(found.values())), saved.origin)


def _plans_for(saved: Saved, captured: Plan) -> tuple[dict[int, Plan], bool]:
    """Return the saved plans for a graph by their numbers, and whether they are exactly for it;
    else they are for the same computation."""
    mark, numbered = fingerprint(captured), dict(enumerate(saved.plans))
    exact = {n: plan for n, plan in numbered.items() if saved.fingerprints[n] == mark}
    if exact:
        return exact, True
    return {n: p for n, p in numbered.items() if is_same_computation(p, captured)}, False


def pinned(fresh: Mapping[str, Paint], pins: Pins) -> dict[str, Paint]:
    """Return the saved colours with their reasons; for a colour edited by hand, the reason says
    what the lists would have said.

    fresh: what the lists say without the plan.

    Raises PlanError if a colour was edited in one plan for this computation, and is another in the
    others.
    """
    found = _followed(fresh, pins.paints)
    for number, others in pins.others.items():
        again = _followed(fresh, others)
        for name in found.keys() & again.keys():
            one, other = found[name], again[name]
            if Rule.EDITED in (one.rule, other.rule) and one.color is not other.color:
                plans, both = (pins.number, number), (one, other)
                raise PlanError(_disagreement(pins.origin, "computation", plans, name, both))
    return found


def _followed(fresh: Mapping[str, Paint], pins: Mapping[str, Paint]) -> dict[str, Paint]:
    found = {}
    for name, ours in fresh.items():
        saved = pins.get(name)
        if saved is None or Color.KEEP in (saved.color, ours.color):
            continue
        if saved.color is ours.color:
            found[name] = ours
        elif (saved.rule, saved.because) == (ours.rule, ours.because):
            because = f"without it {ours.color.value}, {ours.in_brief}"
            found[name] = Paint(saved.color, Rule.EDITED, because)
        else:
            found[name] = Paint(saved.color, saved.rule, saved.because)
    return found


def check_honoured(
    painted: Mapping[str, Paint],
    fresh: Mapping[str, Paint],
    pins: Pins,
    facts: Mapping[str, NodeFacts],
) -> None:
    """Check that colours edited in the saved plan came about. Raises PlanError for the graph that
    they were edited for; warns at another size or in another mode."""
    for name, saved in {**pins.paints, **pins.unplaced}.items():
        now, ours = painted[name], fresh[name]
        if saved.color in (now.color, ours.color):
            continue
        because = facts[now.because].label if now.because in facts else now.because
        label = facts[name].label
        called = f"{label!r}{'' if label == name else f' (there {name!r})'}"
        why = replace(now, because=because).in_brief
        if pins.exact:
            raise PlanError(
                f"{pins.origin}: {called} cannot be {saved.color.value}, it is {now.color.value} "
                f"({why}). Set it back to {ours.color.value}."
            )
        is_edited = (saved.rule, saved.because) == (ours.rule, ours.because)
        if is_edited and not pins.is_trial:
            warn(
                f"{pins.origin}: {called} is {now.color.value} ({why}), not {saved.color.value}, "
                f"in a graph of another size or mode than it was saved in"
            )


def _check_agreement(plans: Sequence[tuple[int, Plan]], origin: str) -> None:
    """Raise PlanError if plans for one graph differ. It may have been captured twice, with
    gradients and without."""
    (first, plan), *others = plans
    paints = _all_paints(plan)
    for other, again in others:
        for name, paint in _all_paints(again).items():
            if name in paints and paints[name].color is not paint.color:
                both = paints[name], paint
                raise PlanError(_disagreement(origin, "graph", (first, other), name, both))


def _all_paints(plan: Plan, body: str = "") -> dict[str, Paint]:
    found = {f"{body}{name}": paint for name, paint in plan.paints.items()}
    for name, inner in plan.bodies.items():
        found |= _all_paints(inner, f"{body}{name}/")
    return found


def _disagreement(
    origin: str, what: str, numbers: tuple[int, int], name: str, paints: tuple[Paint, Paint]
) -> str:
    (first, second), (one, other) = numbers, paints
    return (
        f"{origin}: plans {first} and {second} are for the same {what}, and '{name}' is "
        f"{one.color.value} in one and {other.color.value} in the other. Make them agree, or take "
        "one of the two out."
    )


def _exact_pins(plan: Plan, origin: str) -> Pins:
    bodies = {name: _exact_pins(body, origin) for name, body in plan.bodies.items()}
    return Pins(dict(plan.paints), True, origin, bodies)


def _pins(plans: Mapping[int, Plan], captured: Plan, origin: str) -> Pins:
    """Return the pins of the first of some plans, given by their numbers, for the computation of
    `captured`."""
    (number, paints), *others = ((n, _placed(plan, captured)) for n, plan in plans.items())
    bodies = {
        name: _pins({n: plan.bodies[name] for n, plan in plans.items()}, body, origin)
        for name, body in captured.bodies.items()
    }
    unplaced = {
        name: paint
        for name, paint in plans[number].paints.items()
        if name not in paints and _op(plans[number], name) == _op(captured, name)
    }
    return Pins(paints, False, origin, bodies, number, dict(others), unplaced)


def _op(plan: Plan, name: str) -> str:
    return plan.facts[name].op if name in plan.facts else ""


def _placed(plan: Plan, captured: Plan) -> dict[str, Paint]:
    """Return a plan's paints by the nodes of a captured graph in the places of its own."""
    names = zip(computing(plan), computing(captured), strict=True)
    return {ours: plan.paints[theirs] for theirs, ours in names if theirs in plan.paints}


def _no_plan(saved: Saved, captured: Plan) -> str:
    if not saved.plans:
        return f"{saved.origin}: holds no plan"
    nearest = max(saved.plans, key=lambda plan: common_nodes(plan, captured))
    here = str(torch.__version__)
    versions = f"It was saved under torch {saved.torch}; this is {here}. "
    differs = first_difference(nearest, captured)
    return (
        f"{saved.origin}: none of its plans is for this graph. {differs} "
        f"{versions if saved.torch not in ('', here) else ''}"
        "Save the plans again after the model ran in this way, or convert without a plan."
    )
