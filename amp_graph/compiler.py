"""The Dynamo backend: one graph in, what runs instead of it out, and the plan kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from amp_graph.capture.breaks import break_in
from amp_graph.capture.grad_modes import mode_after, recorded_nodes
from amp_graph.capture.retrace import retrace
from amp_graph.eager import code_of, eager
from amp_graph.errors import MISTAKES
from amp_graph.inductor import compile_graph as inductor
from amp_graph.inductor import options_of
from amp_graph.ir import NodeFacts, Plan
from amp_graph.modules import Run
from amp_graph.nonfinite import run_watched
from amp_graph.oplists import OpLists
from amp_graph.passes.lift_weights import lift_weights
from amp_graph.pins import Pins, Saved, pins_for
from amp_graph.policy import ON_CHANGE, Policy
from amp_graph.rewrite import device_types, outline, rewrite, split_where_wide
from amp_graph.runtime import (
    Guarded,
    restoring_grad_mode,
    under_autocast,
    warn,
    without_autocast,
)
from amp_graph.training.boundary import Boundary
from amp_graph.training.graph_scale import GraphScale
from amp_graph.training.weights import LowPrecisionWeights


@dataclass
class Record:
    """What is known of one conversion: the plans of its graphs in order of capture, how often
    each graph ran, where and why graphs ended before the model did, and the loss scale. It does
    not keep the model alive, nor may what Dynamo gets from `Compiler.compile_graph`, which stays in
    its caches."""

    plans: list[Plan] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)
    breaks: list[str] = field(default_factory=list)
    scale: GraphScale | None = None

    def add(self, plan: Plan) -> int:
        """Keep the plan of a graph that was captured, or of code without one; its index."""
        self.plans.append(plan)
        return len(self.plans) - 1

    def fall_back(self, index: int, reason: str) -> None:
        plan = self.plans[index]
        self.plans[index] = replace(plan, low=frozenset(), casts=(), fallback=reason)
        warn(f"graph {index} runs as it was captured, in its own precision: {reason}")

    def not_under_autocast(self, index: int, what: str, reason: str) -> None:
        plan = self.plans[index]
        why = f"{plan.fallback}; autocast fails ({reason})"
        self.plans[index] = replace(plan, fallback=why, autocast=False)
        warn(f"{what} runs in float32: autocast fails ({reason})")

    def not_compiled(self, index: int, reason: str) -> None:
        reason = " ".join(reason.split())
        self.plans[index] = replace(self.plans[index], uncompiled=reason)
        warn(f"graph {index} is not compiled, but runs operator by operator: {reason}")


Weights: TypeAlias = tuple[tuple[int, torch.dtype], ...]
Graphs: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]


class Compiler:
    """Rewrites every graph that Dynamo hands over; keeps their plans in order of capture."""

    def __init__(self, policy: Policy, saved: Saved | None = None):
        self.policy = policy
        self.record = Record()
        self.lists = policy.load_lists()
        self._weights = LowPrecisionWeights(kept=policy.refresh_weights == ON_CHANGE)
        self.saved = saved
        self._graphs: dict[int, Graphs] = {}
        self._runs: list[Run] = []  # that stand in `captured_call` for graphs

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(self.record.plans)

    @property
    def graphs(self) -> tuple[Graphs | None, ...]:
        """Beside each plan its graph as captured and as emitted; None where there is none."""
        return tuple(self._graphs.get(i) for i in range(len(self.record.plans)))

    def module_names(self) -> dict[str, str]:
        """The path of each module of the model by its id; see `retrace`."""
        return {}

    def scale_for(self, dtype: torch.dtype) -> GraphScale | None:
        """What gradients are scaled by in graphs of this low precision; None: they are not."""
        return None

    def compile_graph(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Return what runs instead of a Dynamo graph. Whatever fails here, something right runs:
        a graph that cannot be retraced runs under autocast, one that cannot be rewritten as it
        was captured."""
        devices = _devices_of(example_inputs)
        original = restoring_grad_mode(code_of(eager(graph)))
        self.record.breaks += break_in(graph)
        try:
            aten = retrace(graph, self.module_names())
            aten = split_where_wide(aten, self.policy, self.lists)
        except MISTAKES:
            raise
        except Exception as error:
            return self._not_retraced(original, example_inputs, error)
        devices |= device_types(aten)
        pins = self._pins_for(aten)
        try:
            emitted, plan = rewrite(aten, self.policy, self.lists, pins)
            lifted, weights = lift_weights(emitted, plan)
        except MISTAKES:
            raise
        except Exception as error:
            index = self._keep(outline(aten, self.policy, self.lists), aten, aten)
            self.record.fall_back(index, f"{type(error).__name__}: {error}")
            return original
        index = self._keep(plan, aten, emitted)
        runnable = eager(lifted)
        run, parameters = runnable.forward, _parameters_read(lifted, self.lists)
        if self.policy.compiler == "inductor":
            parameters = dict.fromkeys(parameters, False)
            run = self._compiled(index, lifted, weights, run, graph, example_inputs, devices)
        watched = partial(run_watched, runnable, plan.facts)
        boundary = Boundary(
            without_autocast(run, devices),
            self._weights,
            self.scale_for(plan.dtype),
            weights,
            parameters,
            without_autocast(watched, devices),
            records=_records_some(lifted),
            ends_recording=mode_after(lifted.graph),
            written=written_inputs(plan),
        )
        return Guarded(
            restoring_grad_mode(boundary),
            original,
            _inputs_at_risk(plan),
            partial(self.record.fall_back, index),
        )

    def _compiled(
        self,
        index: int,
        lifted: fx.GraphModule,
        weights: Weights,
        by_operator: Run,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        devices: frozenset[str],
    ) -> Callable[..., Any]:
        """The emitted graph compiled; `by_operator`, if that fails now or in its first run."""
        options = options_of(self.policy.compiler_options)
        fail = partial(self.record.not_compiled, index)
        try:
            compiled = inductor(
                lifted, weights, by_operator, graph, example_inputs, options, devices
            )
        except RestartAnalysis:  # Dynamo captures the graph again, and calls again
            del self.record.plans[index], self._graphs[index]
            raise
        except Exception as error:
            fail(f"{type(error).__name__}: {error}")
            return by_operator
        at_risk = _inputs_at_risk(self.record.plans[index])
        return Guarded(compiled, by_operator, at_risk, fail)

    def _pins_for(self, aten: fx.GraphModule) -> Pins | None:
        if self.saved is None:
            return None
        return pins_for(self.saved, outline(aten, self.policy, self.lists))

    def _keep(self, plan: Plan, captured: fx.GraphModule, emitted: fx.GraphModule) -> int:
        index = self.record.add(plan)
        self._graphs[index] = (captured, emitted)
        return index

    def _not_retraced(self, original: Run, example_inputs: Sequence[Any], error: Exception) -> Run:
        devices = _devices_of(example_inputs)
        dtype = self.policy.dtype_for(devices)
        reason = " ".join(f"not retraced to ATen ({type(error).__name__}: {error})".split())
        index = self.record.add(Plan(dtype, fallback=reason, autocast=True))
        run: Run = Guarded(
            under_autocast(original, devices, dtype),
            original,
            [i for i, x in enumerate(example_inputs) if isinstance(x, torch.Tensor)],
            partial(self.record.not_under_autocast, index, f"graph {index}"),
        )
        scale = self.scale_for(dtype)
        if scale is None:
            return run
        return Boundary(run, self._weights, scale, written=range(len(example_inputs)))


def _records_some(module: fx.GraphModule) -> bool:
    """Whether autograd records anything of a graph, as it would be called now."""
    bodies = (m for m in module.children() if isinstance(m, fx.GraphModule))
    return bool(recorded_nodes(module.graph)) or any(map(_records_some, bodies))


def _devices_of(inputs: Sequence[Any]) -> frozenset[str]:
    return frozenset(x.device.type for x in inputs if isinstance(x, torch.Tensor))


def _parameters_read(module: fx.GraphModule, lists: OpLists) -> dict[int, bool]:
    """Positions of the inputs that are parameters and that the graph itself reads; and of each,
    whether one operator reads it that makes a gradient for it alone."""
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    read = {i: [*n.users] for i, n in inputs if n.meta.get("is_parameter") and n.users}
    entries = {i: lists.lookup(by[0].target) for i, by in read.items() if len(by) == 1}
    return {i: bool((entry := entries.get(i)) and entry.own_gradients) for i in read}


def _inputs(plan: Plan) -> Iterator[tuple[int, NodeFacts]]:
    return enumerate(f for f in plan.facts.values() if f.op == "placeholder")


def written_inputs(plan: Plan) -> frozenset[int]:
    return frozenset(i for i, f in _inputs(plan) if f.written)


def _inputs_at_risk(plan: Plan) -> list[int]:
    """Inputs that a run may write into: not every schema says so (batch_norm's does not), hence
    all but parameters."""
    return [i for i, f in _inputs(plan) if f.tensors and (f.written or not f.is_parameter)]
