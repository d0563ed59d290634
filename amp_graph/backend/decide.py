"""Decide: plan how one captured graph is to run, as data.

    Dynamo's graph -- retrace --> captured -- rewrite --> emitted -- lift weights --> lifted

If a step fails the decision is for something that is still right: a graph that cannot be retraced
runs under autocast, one that cannot be rewritten runs as captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from amp_graph.backend.rewrite import device_types, outline, rewrite, saved_pins, split_as_saved
from amp_graph.boundary.inner_scaling import Inside
from amp_graph.capture.retrace import retrace
from amp_graph.errors import MISTAKES, in_words
from amp_graph.graphs.input_names import Names
from amp_graph.ir import Plan
from amp_graph.oplists import OpLists
from amp_graph.passes.lift_weights import lift_weights, with_lifted
from amp_graph.passes.scale_inside import scale_inside
from amp_graph.plans.pins import Saved
from amp_graph.policy import Policy

Weights: TypeAlias = tuple[tuple[int, torch.dtype], ...]


class Traced(NamedTuple):
    """A graph of Dynamo's, and the inputs it was called with. Nobody may keep the inputs."""

    graph: fx.GraphModule
    inputs: Sequence[Any]


class Graphs(NamedTuple):
    """A graph in ATen form, as captured and in mixed precision."""

    captured: fx.GraphModule
    emitted: fx.GraphModule


class Lifted(NamedTuple):
    """An emitted graph whose low-precision weights are inputs, after the captured ones.

    weights: for each such input, the position of its parameter among the captured inputs, and its
        dtype.
    devices: the kinds of device that the graph computes on.
    inside: the gradients that the graph scales by itself.
    """

    graph: fx.GraphModule
    weights: Weights
    devices: frozenset[str]
    inside: Inside | None = None


@dataclass(frozen=True)
class Decision:
    """The decision for one graph.

    graphs: None if the graph could not be retraced; the captured graph twice if it could not be
        rewritten.
    lifted: the graph that is to run; None in both cases, for which the plan has the reason.
    """

    plan: Plan
    graphs: Graphs | None = None
    lifted: Lifted | None = None


def decide(
    traced: Traced,
    policy: Policy,
    lists: OpLists,
    saved: Saved | None,
    names: Names | None,
) -> Decision:
    """Decide, under the modes in force, how a graph of Dynamo's is to run. The graph is left as it
    is.

    names: see `retrace`.

    Raises what the user has to mend: PlanError if no saved plan is for this graph, PolicyError if
    an override cannot be evaluated.
    """
    try:
        whole = retrace(traced.graph, names, traced.inputs)
        captured = split_as_saved(whole, policy, lists, saved)
    except MISTAKES:
        raise
    except Exception as error:
        reason = _why_not_retraced(error, traced.inputs)
        dtype = policy.dtype_for(devices_of_inputs(traced.inputs))
        return Decision(Plan(dtype, fallback=reason, autocast=True))
    pins = saved_pins(captured, saved, policy, lists)
    try:
        emitted, plan = rewrite(captured, policy, lists, pins)
        devices = devices_of_inputs(traced.inputs) | device_types(captured)
        lifted = _lifted(emitted, plan, traced.inputs, policy, devices)
    except MISTAKES:
        raise
    except Exception as error:
        plan = outline(captured, policy, lists).as_captured(in_words(error))
        return Decision(plan, Graphs(captured, captured))
    plan = with_lifted(plan) if lifted.weights else plan
    return Decision(plan, Graphs(captured, emitted), lifted)


def _why_not_retraced(error: Exception, inputs: Sequence[Any]) -> str:
    if any(hasattr(x, "device_mesh") for x in inputs):
        return "DTensors, as of tensor and sequence parallelism, are not captured"
    return f"not retraced to ATen ({in_words(error)})"


def _lifted(
    emitted: fx.GraphModule,
    plan: Plan,
    inputs: Sequence[Any],
    policy: Policy,
    devices: frozenset[str],
) -> Lifted:
    """Lift the weights out of an emitted graph, or have a graph that will be compiled keep its
    casts.

    Outside, all low-precision weights are made in one call, or kept between calls, and gradients
    are scaled. A compiler fuses a cast or a multiplication with the operators beside it, and needs
    no call of ours for either; it scales gradients inside.
    """
    if not policy.is_compiled or policy.keeps_weights:
        return Lifted(*lift_weights(emitted, plan), devices)
    if policy.loss_scale_for(plan.dtype) is None:
        return Lifted(emitted, (), devices)
    trained = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    graph, inside = scale_inside(emitted, plan.facts, trained)
    return Lifted(graph, (), devices, inside)


def devices_of_inputs(inputs: Sequence[Any]) -> frozenset[str]:
    """Return the kinds of device that these inputs of a graph are on."""
    return frozenset(x.device.type for x in inputs if isinstance(x, torch.Tensor))
