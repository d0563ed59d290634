"""The compiler: the stages in order, for one graph and the graphs inside it."""

from __future__ import annotations

from torch import fx

from amp_graph.capture.aten import bodies_of, tensors_of
from amp_graph.flow import flow_graph
from amp_graph.ir import Plan
from amp_graph.oplists import OpLists
from amp_graph.passes.annotate import annotate
from amp_graph.passes.emit import emit
from amp_graph.passes.paint import paint
from amp_graph.passes.place_casts import place_casts
from amp_graph.passes.split_attention import split_attention
from amp_graph.passes.verify import verify
from amp_graph.policy import Policy


def rewrite(
    captured: fx.GraphModule, policy: Policy, lists: OpLists
) -> tuple[fx.GraphModule, Plan]:
    """Return the mixed-precision form of an ATen graph and the plan it follows.

    `captured` is left as it was. Raises VerifyError if the result fails a check.
    """
    dtype = policy.dtype_for(device_types(captured))
    facts = annotate(captured, lists)
    flow = flow_graph(facts)
    paints = paint(facts, flow, lists, policy, dtype)
    split = split_attention(captured, paints)
    if split is not captured:
        return rewrite(split, policy, lists)
    bodies = {
        name: rewrite_body(body, policy, lists)
        for node in captured.graph.nodes
        for name, body in bodies_of(captured, node).items()
    }
    low, _ = place_casts(facts, flow, paints, dtype)
    new_bodies = {name: body for name, (body, _) in bodies.items()}
    emitted = emit(captured, facts, paints, low, dtype, lists, new_bodies)
    body_plans = {name: plan for name, (_, plan) in bodies.items()}
    plan = Plan(dtype, facts, paints, emitted.low, emitted.casts, body_plans)
    verify(captured, emitted.module, plan)
    return emitted.module, plan


def rewrite_body(
    body: fx.GraphModule, policy: Policy, lists: OpLists
) -> tuple[fx.GraphModule, Plan]:
    """As `rewrite`, but a body that fails runs as captured, and its plan says so."""
    try:
        return rewrite(body, policy, lists)
    except Exception as error:
        dtype = policy.dtype_for(device_types(body))
        return body, Plan(dtype, fallback=f"{type(error).__name__}: {error}")


def device_types(module: fx.GraphModule) -> frozenset[str]:
    """The kinds of device that a graph's tensors live on."""
    found = {t.device.type for node in module.graph.nodes for t in tensors_of(node)}
    return frozenset(found or {"cpu"})
