"""From a model to its annotated graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from amp_graph.calls.conversion import conversion_of
from amp_graph.capture.breaks import each_once
from amp_graph.dtypes import dtype_name
from amp_graph.errors import AmpGraphError
from amp_graph.inspection.annotated import AnnotatedGraph, annotated_graph
from amp_graph.inspection.flops import FlopCounts
from amp_graph.ir import Plan
from amp_graph.oplists import OpLists, load_lists
from amp_graph.plans.pins import Saved
from amp_graph.policy import Policy
from amp_graph.reasons import dtype_of

NO_LISTS = OpLists({}, {})


@dataclass(frozen=True)
class AnnotatedModel:
    """The graphs that a converted model is called by, in order of capture, and where they break.

    `before[i]` is the graph as captured, `after[i]` as it runs, `plans[i]` its plan. Those that
    were captured anew since are left out. `policy`, `lists` and `saved` plans decided.
    """

    name: str
    dtype: str
    plans: tuple[Plan, ...]
    before: tuple[AnnotatedGraph, ...]
    after: tuple[AnnotatedGraph, ...]
    breaks: tuple[str, ...]
    policy: Policy = field(default_factory=Policy)
    lists: OpLists = field(default_factory=load_lists)
    saved: Saved | None = None


def annotated_model(model: nn.Module) -> AnnotatedModel:
    """Return a converted model as all views show it. Raises AmpGraphError if no graph is
    captured."""
    conversion = conversion_of(model)
    compiler, places = conversion.compiler, conversion.places_in_force()
    if not places:
        name = type(model).__name__
        call = "call it once, or once more if its first call set it up"
        raise AmpGraphError(f"no graph of {name} is captured; {call}")
    plans, before, after, flops = [], [], [], FlopCounts()
    for place in places:
        name, plan = f"graph{place}", compiler.plans[place]
        captured, emitted = compiler.graphs[place] or (None, None)
        emitted = captured if plan.fallback is not None else emitted
        plans.append(plan)
        before.append(annotated_graph(name, _undecided(plan), captured, NO_LISTS, flops))
        after.append(annotated_graph(name, plan, emitted, compiler.lists, flops))
    return AnnotatedModel(
        type(model).__name__,
        dtype_name(dtype_of(plans)),
        tuple(plans),
        tuple(before),
        tuple(after),
        tuple(each_once(compiler.record.breaks)),
        compiler.policy,
        compiler.lists,
        compiler.saved,
    )


def _undecided(plan: Plan) -> Plan:
    """Return a plan of the same graph that decides nothing."""
    bodies = {name: _undecided(body) for name, body in plan.bodies.items()}
    return Plan(plan.dtype, plan.facts, bodies=bodies) if plan.facts else plan
