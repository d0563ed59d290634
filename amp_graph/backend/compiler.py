"""The Dynamo backend: it takes a graph, returns what runs instead, and keeps the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from amp_graph.backend.assemble import Assembler, ScaleFor
from amp_graph.backend.build import Built, build
from amp_graph.backend.decide import Graphs, Traced, decide
from amp_graph.backend.record import Record
from amp_graph.capture.breaks import break_in
from amp_graph.graphs.input_names import Names
from amp_graph.ir import Plan
from amp_graph.modules import Run
from amp_graph.plans.pins import Saved
from amp_graph.policy import Policy
from amp_graph.weights.store import LowPrecisionWeights


def unscaled(dtype: torch.dtype) -> None:
    """No loss scale, whatever the dtype."""


class Compiler:
    """Rewrites every graph that Dynamo captures of one model, and keeps plans and graphs in order
    of capture. `model`: the model's name in warnings."""

    def __init__(
        self,
        policy: Policy,
        saved: Saved | None = None,
        scale_for: ScaleFor = unscaled,
        weights: LowPrecisionWeights | None = None,
        model: str = "",
    ) -> None:
        if weights is None:
            weights = LowPrecisionWeights(policy.keeps_weights)
        self.policy = policy
        self.saved = saved
        self.record = Record(model)
        self.lists = policy.load_lists()
        self._assembler = Assembler(weights, self.record, scale_for)
        self._graphs: dict[int, Graphs | None] = {}

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(self.record.plans)

    @property
    def graphs(self) -> tuple[Graphs | None, ...]:
        """The captured and emitted graph of each plan; None for a plan without a graph."""
        return tuple(self._graphs.get(i) for i in range(len(self.record.plans)))

    @property
    def captured(self) -> frozenset[int]:
        """The indices of the plans that belong to graphs. The others stand for code that is not
        captured."""
        return frozenset(self._graphs)

    def compile_graph(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Run:
        """Return the function that runs instead of a graph of Dynamo's. Raises as `decide` does."""
        _, run = self.assemble(self.build(graph, example_inputs))
        return run

    def build(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        names: Names | None = None,
    ) -> Built:
        """Build for a graph of Dynamo's, for this model and any that is called by the graph."""
        traced = Traced(graph, example_inputs)
        decision = decide(traced, self.policy, self.lists, self.saved, names)
        return build(traced, decision, self.policy, self.lists)

    def assemble(self, built: Built) -> tuple[int, Run]:
        """Assemble a built graph in this model. Returns the index of its plan, and the function
        that runs instead of the graph."""
        self.record.breaks += break_in(built.graph)
        decision = built.decision
        index = self.record.add(decision.plan)
        self._graphs[index] = decision.graphs
        if decision.graphs is not None and decision.lifted is None:
            self.record.tell_as_captured(index)
        return index, self._assembler.assemble(index, built)
