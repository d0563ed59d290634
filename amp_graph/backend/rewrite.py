"""The stages in order, for one graph and the graphs inside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import networkx as nx
import torch
from torch import fx

from amp_graph.errors import MISTAKES, in_words
from amp_graph.flow import flow_graph
from amp_graph.graphs.aten import (
    WHY_NOT_RETRACED,
    bodies_of,
    is_retraced,
    set_attribute,
    tensors_of,
)
from amp_graph.graphs.grad_modes import recorded_nodes
from amp_graph.ir import NodeFacts, Paint, Plan
from amp_graph.levels import Level
from amp_graph.oplists import OpLists
from amp_graph.passes.annotate import annotate
from amp_graph.passes.emit import emit
from amp_graph.passes.paint import paint
from amp_graph.passes.place_casts import place_casts
from amp_graph.passes.split_attention import may_split, split_attention
from amp_graph.passes.verify import verify
from amp_graph.plans.pins import Pins, Saved, check_honoured, has_plan, pinned, pins_for
from amp_graph.policy import Policy


def rewrite(
    captured: fx.GraphModule, policy: Policy, lists: OpLists, pins: Pins | None = None
) -> tuple[fx.GraphModule, Plan]:
    """Return the mixed-precision form of an ATen graph and the plan it follows.

    `captured`, whose attention is split already where need be, is left as it was. `pins` has
    decisions of a saved plan, which beat the lists. Raises VerifyError if the result fails a check,
    PlanError if a saved decision cannot be honoured, PolicyError if an override cannot be
    evaluated.
    """
    dtype = policy.dtype_for(device_types(captured))
    bodies: dict[str, tuple[fx.GraphModule, Plan]] = {}
    recorded = recorded_nodes(captured.graph)
    for node in captured.graph.nodes:
        with torch.set_grad_enabled(node in recorded):
            for name, body in bodies_of(captured, node).items():
                bodies[name] = rewrite_body(body, policy, lists, pins and pins.bodies.get(name))
    facts = annotate(captured, lists, dtype)
    flow = flow_graph(facts)
    new_bodies = {name: body for name, (body, _) in bodies.items()}
    body_plans = {name: plan for name, (_, plan) in bodies.items()}
    refused: frozenset[str] = frozenset()
    while True:
        fresh, paints = painted(facts, flow, lists, policy, dtype, pins, refused)
        if pins is not None:
            check_honoured(paints, fresh, pins, facts)
        low = place_casts(facts, flow, paints)
        emitted = emit(captured, facts, paints, low, dtype, lists, new_bodies)
        if not emitted.refused:
            break
        assert not emitted.refused <= refused, f"{sorted(refused)} are low, though refused before"
        refused |= emitted.refused
    plan = Plan(dtype, facts, paints, low, emitted.casts, body_plans)
    verify(captured, emitted.module, plan)
    return emitted.module, plan


def painted(
    facts: Mapping[str, NodeFacts],
    flow: nx.DiGraph,
    lists: OpLists,
    policy: Policy,
    dtype: torch.dtype,
    pins: Pins | None,
    refused: Collection[str],
) -> tuple[Mapping[str, Paint], Mapping[str, Paint]]:
    """Return the paints without the decisions of a saved plan, and the paints with them."""
    fresh = paint(facts, flow, lists, policy, dtype, refused=refused)
    if pins is None:
        return fresh, fresh
    return fresh, paint(facts, flow, lists, policy, dtype, pinned(fresh, pins), refused)


def split_where_wide(captured: fx.GraphModule, policy: Policy, lists: OpLists) -> fx.GraphModule:
    """Return the graph, bodies included, with those calls of attention split that are painted low
    and that PyTorch would compute in float32 inside. Return the graph itself if there are none, and
    at level "safe", which leaves them to PyTorch."""
    bodies = {
        name: body
        for node in captured.graph.nodes
        for name, body in bodies_of(captured, node).items()
        if is_retraced(body)
    }
    split = {name: split_where_wide(body, policy, lists) for name, body in bodies.items()}
    if any(split[name] is not bodies[name] for name in bodies):
        captured = fx.GraphModule(captured, captured.graph, class_name="AtenGraph")
        for name, body in split.items():
            set_attribute(captured, name, body)
    if Level(policy.level) is Level.SAFE or not may_split(captured):
        return captured
    dtype = policy.dtype_for(device_types(captured))
    facts = annotate(captured, lists, dtype)
    return split_attention(captured, paint(facts, flow_graph(facts), lists, policy, dtype))


def split_as_saved(
    captured: fx.GraphModule, policy: Policy, lists: OpLists, saved: Saved | None
) -> fx.GraphModule:
    """Return the graph as `split_where_wide` does, or with all or none of its attention split if
    that is what the saved plans are for. They may have been made at another level, or with
    overrides that left attention whole."""
    split = split_where_wide(captured, policy, lists)
    if saved is None:
        return split
    forms = dict.fromkeys(
        (split, captured, split_where_wide(captured, Policy(policy.dtype), lists))
    )
    if len(forms) == 1:
        return split
    plans = ((form, outline(form, policy, lists)) for form in forms)
    return next((form for form, plan in plans if has_plan(saved, plan)), split)


def rewrite_body(
    body: fx.GraphModule, policy: Policy, lists: OpLists, pins: Pins | None
) -> tuple[fx.GraphModule, Plan]:
    """Rewrite a body. One that fails runs as captured, and its plan says so."""
    dtype = policy.dtype_for(device_types(body))
    if not is_retraced(body):
        return body, Plan(dtype, fallback=f"not retraced to ATen ({body.meta[WHY_NOT_RETRACED]})")
    try:
        return rewrite(body, policy, lists, pins)
    except MISTAKES:
        raise
    except Exception as error:
        return body, Plan(dtype, fallback=in_words(error))


def device_types(module: fx.GraphModule) -> frozenset[str]:
    """Return the kinds of device that a graph's tensors are on."""
    found = {t.device.type for node in module.graph.nodes for t in tensors_of(node)}
    return frozenset(found or {"cpu"})


def saved_pins(
    captured: fx.GraphModule, saved: Saved | None, policy: Policy, lists: OpLists
) -> Pins | None:
    """Return the decisions of saved plans for a captured graph. Raises PlanError if no plan is for
    it."""
    return None if saved is None else pins_for(saved, outline(captured, policy, lists))


def outline(captured: fx.GraphModule, policy: Policy, lists: OpLists) -> Plan:
    """Return the facts of a captured graph and its bodies as a plan that decides nothing. It is
    empty for a graph that cannot be annotated; `rewrite` tells why."""
    dtype = policy.dtype_for(device_types(captured))
    try:
        facts = annotate(captured, lists, dtype)
        bodies = {
            name: outline(body, policy, lists)
            for node in captured.graph.nodes
            for name, body in bodies_of(captured, node).items()
        }
    except MISTAKES:
        raise
    except Exception:
        return Plan(dtype)
    return Plan(dtype, facts, bodies=bodies)
