"""From a model to its annotated graphs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from amp_graph.calls.conversion import conversion_of
from amp_graph.capture.breaks import each_once
from amp_graph.errors import AmpGraphError
from amp_graph.inspection.annotated import AnnotatedGraph, annotated_graph, captured_graph
from amp_graph.ir import Plan


@dataclass(frozen=True)
class AnnotatedModel:
    """All graphs of a converted model, in order of capture, and where its graphs break.

    `before[i]` is the graph as captured, `after[i]` as it runs, `plans[i]` its plan.
    """

    name: str
    dtype: str
    plans: tuple[Plan, ...]
    before: tuple[AnnotatedGraph, ...]
    after: tuple[AnnotatedGraph, ...]
    breaks: tuple[str, ...]


def annotated_model(model: nn.Module) -> AnnotatedModel:
    """What there is to see of a converted model. Raises AmpGraphError if there is nothing."""
    compiler = conversion_of(model).compiler
    if not compiler.plans:
        name = type(model).__name__
        raise AmpGraphError(f"no graph of {name} is captured; call it once")
    before, after = [], []
    for i, (plan, graphs) in enumerate(zip(compiler.plans, compiler.graphs, strict=True)):
        captured, emitted = graphs or (None, None)
        emitted = captured if plan.fallback is not None else emitted
        before.append(captured_graph(f"graph{i}", plan, captured))
        after.append(annotated_graph(f"graph{i}", plan, emitted, compiler.lists))
    return AnnotatedModel(
        type(model).__name__,
        after[0].dtype,
        compiler.plans,
        tuple(before),
        tuple(after),
        tuple(each_once(compiler.record.breaks)),
    )
