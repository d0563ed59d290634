"""Assemble: put together what runs instead of a captured graph in one model.

    Guarded( Boundary( emitted graph, operator by operator or compiled ), the captured graph )

Each layer is one stage of distrust: an emitted graph that fails in its first run gives way to the
captured one, a compiled graph to its operators one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from amp_graph.backend.build import Built, Executable, inputs_at_risk
from amp_graph.backend.guarded import Guarded
from amp_graph.backend.record import Record
from amp_graph.boundary.inner import InnerBoundary
from amp_graph.boundary.inner_scaling import Inside
from amp_graph.boundary.outer import Boundary, Interface
from amp_graph.ir import Plan
from amp_graph.modes import under_autocast
from amp_graph.modules import Run
from amp_graph.outer_autocast import without_autocast
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.watched import run_watched
from amp_graph.weights.store import LowPrecisionWeights

ScaleFor: TypeAlias = Callable[[torch.dtype], GraphScale | None]


class Assembler:
    """Assembles the graphs of one model, which share its low-precision weights and its loss scale.

    record: is told which graphs give way.
    scale_for: returns the loss scale for graphs of a low precision; None if gradients are not
        scaled.
    """

    def __init__(self, weights: LowPrecisionWeights, record: Record, scale_for: ScaleFor):
        self._weights = weights
        self._record = record
        self._scale_for = scale_for

    def assemble(self, index: int, built: Built) -> Run:
        """Return the function that runs instead of Dynamo's graph. `index`: the place of its
        plan."""
        plan = built.decision.plan
        if built.decision.graphs is None:
            return self._under_autocast(index, built)
        if built.executable is None:
            return built.original
        return Guarded(
            built.restoring(self._rewritten(index, plan, built.executable)),
            built.original,
            inputs_at_risk(plan),
            partial(self._record.fall_back, index),
        )

    def _rewritten(self, index: int, plan: Plan, executable: Executable) -> Run:
        devices = executable.devices
        run = without_autocast(self._run(index, plan, executable), devices)
        watched = without_autocast(partial(run_watched, executable.graph, plan.facts), devices)
        scale, interface = self._scale_for(plan.dtype), executable.interface
        if isinstance(interface, Inside):
            return InnerBoundary(run, interface, scale, watched)
        return Boundary(run, interface, self._weights, scale, watched)

    def _run(self, index: int, plan: Plan, executable: Executable) -> Run:
        """Return the compiled graph, if there is one, with a way back to running operator by
        operator if its first run fails; else the graph operator by operator."""
        fail, by_operator = partial(self._record.not_compiled, index), executable.graph.forward
        if executable.compiled is not None:
            return Guarded(executable.compiled, by_operator, inputs_at_risk(plan), fail)
        if executable.uncompiled:
            fail(executable.uncompiled)
        return by_operator

    def _under_autocast(self, index: int, built: Built) -> Run:
        dtype = built.decision.plan.dtype
        run: Run = Guarded(
            under_autocast(built.original, built.devices, dtype, keeps_casts=False),
            built.original,
            built.tensors,
            partial(self._record.not_under_autocast, index, self._record.graph(index)),
        )
        scale = self._scale_for(dtype)
        if scale is None:
            return run
        return Boundary(run, Interface(written=built.tensors), self._weights, scale)
