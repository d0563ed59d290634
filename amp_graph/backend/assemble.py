"""Assemble: what runs instead of a captured graph, from what was decided about it.

    Guarded( Boundary( emitted graph, operator by operator or compiled ), the captured graph )

Each layer is one stage of distrust: an emitted graph that fails in its first run gives way to the
captured one, a compiled graph to its operators one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from amp_graph.backend.decide import Decision, Lifted, Traced, devices_of_inputs
from amp_graph.backend.eager import code_of, eager
from amp_graph.backend.emulation import emulated_nodes
from amp_graph.backend.guarded import Guarded
from amp_graph.backend.inductor import compile_graph as inductor
from amp_graph.backend.record import Record
from amp_graph.capture.grad_modes import mode_after, recorded_nodes
from amp_graph.capture.retrace import changes_modes
from amp_graph.errors import in_words
from amp_graph.ir import NodeFacts, Plan
from amp_graph.modes import restoring_modes, under_autocast, without_autocast
from amp_graph.modules import Run
from amp_graph.oplists import OpLists
from amp_graph.policy import ON_CHANGE, Policy
from amp_graph.training.boundary import Boundary
from amp_graph.training.graph_scale import GraphScale
from amp_graph.training.weights import LowPrecisionWeights
from amp_graph.watched import run_watched

ScaleFor: TypeAlias = Callable[[torch.dtype], GraphScale | None]


class Assembler:
    """Assembles what runs instead of the graphs of one model, which share its low-precision weights
    and its loss scale.

    record: is told what gives way to what.
    scale_for: what gradients are scaled by in graphs of a low precision; None: they are not.
    """

    def __init__(self, policy: Policy, lists: OpLists, record: Record, scale_for: ScaleFor):
        self._policy = policy
        self._lists = lists
        self._record = record
        self._scale_for = scale_for
        self._emulated = emulated_nodes(policy, lists)
        self._weights = LowPrecisionWeights(kept=policy.refresh_weights == ON_CHANGE)

    def assemble(self, index: int, decision: Decision, traced: Traced) -> Run:
        """What runs instead of Dynamo's graph, for which plan `index` stands. Raises
        RestartAnalysis where Dynamo is to capture the graph again."""
        restoring = restoring_modes if changes_modes(traced.graph) else _as_it_is
        plan, original = decision.plan, restoring(code_of(eager(traced.graph)))
        if decision.graphs is None:
            return self._under_autocast(index, plan.dtype, original, traced.inputs)
        if decision.lifted is None:
            return original
        return Guarded(
            restoring(self._rewritten(index, plan, decision.lifted, traced)),
            original,
            _inputs_at_risk(plan),
            partial(self._record.fall_back, index),
        )

    def _rewritten(self, index: int, plan: Plan, lifted: Lifted, traced: Traced) -> Boundary:
        by_operator = eager(lifted.graph, self._emulated)
        run, parameters = by_operator.forward, _parameters_read(lifted.graph, self._lists)
        if self._policy.compiler == "inductor":
            parameters = dict.fromkeys(parameters, False)
            run = self._compiled(index, plan, lifted, traced, run)
        watched = partial(run_watched, by_operator, plan.facts)
        return Boundary(
            without_autocast(run, lifted.devices),
            self._weights,
            self._scale_for(plan.dtype),
            lifted.weights,
            parameters,
            without_autocast(watched, lifted.devices),
            records=_records_some(lifted.graph),
            ends_recording=mode_after(lifted.graph.graph),
            written=written_inputs(plan),
        )

    def _compiled(
        self, index: int, plan: Plan, lifted: Lifted, traced: Traced, by_operator: Run
    ) -> Run:
        """The emitted graph compiled; `by_operator`, if that fails now or in its first run."""
        settings = self._policy.inductor_settings()
        fail = partial(self._record.not_compiled, index)
        try:
            compiled = inductor(lifted, by_operator, traced, settings)
        except RestartAnalysis:
            raise
        except Exception as error:
            fail(in_words(error))
            return by_operator
        return Guarded(compiled, by_operator, _inputs_at_risk(plan), fail)

    def _under_autocast(
        self, index: int, dtype: torch.dtype, original: Run, inputs: Sequence[Any]
    ) -> Run:
        run: Run = Guarded(
            under_autocast(original, devices_of_inputs(inputs), dtype, keeps_casts=False),
            original,
            [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)],
            partial(self._record.not_under_autocast, index, f"graph {index}"),
        )
        scale = self._scale_for(dtype)
        if scale is None:
            return run
        return Boundary(run, self._weights, scale, written=range(len(inputs)))


def written_inputs(plan: Plan) -> frozenset[int]:
    """Positions of the inputs that a graph writes to."""
    return frozenset(i for i, f in _inputs(plan) if f.written)


def _inputs_at_risk(plan: Plan) -> list[int]:
    """Inputs that a run may write into: not every schema says so (batch_norm's does not), hence
    all but parameters."""
    return [i for i, f in _inputs(plan) if f.tensors and (f.written or not f.is_parameter)]


def _inputs(plan: Plan) -> Iterator[tuple[int, NodeFacts]]:
    return enumerate(f for f in plan.facts.values() if f.op == "placeholder")


def _records_some(module: fx.GraphModule) -> bool:
    """Whether autograd records anything of a graph, as it would be called now."""
    bodies = (m for m in module.children() if isinstance(m, fx.GraphModule))
    return bool(recorded_nodes(module.graph)) or any(map(_records_some, bodies))


def _parameters_read(module: fx.GraphModule, lists: OpLists) -> dict[int, bool]:
    """Positions of the inputs that are parameters and that the graph itself reads; and of each,
    whether one operator reads it that makes a gradient for it alone."""
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    read = {i: [*n.users] for i, n in inputs if n.meta.get("is_parameter") and n.users}
    entries = {i: lists.lookup(by[0].target) for i, by in read.items() if len(by) == 1}
    return {i: bool((entry := entries.get(i)) and entry.own_gradients) for i in read}


def _as_it_is(run: Run) -> Run:
    return run
