"""Build: make what runs a captured graph, and the graph emitted for it, in any model.

    decision -- operator by operator, perhaps compiled --> built -- assemble --> in one model

All slow steps happen here, once for all models that are called by the graph. The result holds no
tensor of the model whose call was captured.

Private names of PyTorch used here:

    torch._dynamo.exc.RestartAnalysis    by which a backend has Dynamo capture again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from amp_graph.backend.decide import Decision, Lifted, Traced, devices_of_inputs
from amp_graph.backend.eager import code_of, eager
from amp_graph.backend.emulation import emulated_nodes
from amp_graph.backend.inductor import compile_graph
from amp_graph.boundary.inner_scaling import Inside
from amp_graph.boundary.outer import Interface
from amp_graph.capture.retrace import changes_modes
from amp_graph.errors import in_words
from amp_graph.graphs.grad_modes import mode_after, recorded_nodes
from amp_graph.ir import NodeFacts, Plan
from amp_graph.modes import restoring_modes
from amp_graph.modules import Run
from amp_graph.oplists import OpLists
from amp_graph.passes.early_results import let_leave_early
from amp_graph.passes.lift_results import lift_results
from amp_graph.policy import Policy


@dataclass(frozen=True)
class Executable:
    """An emitted graph, ready to run.

    graph: its operators, in the form that runs by itself.
    interface: what it takes and returns; for a graph that scales by itself, what it scales.
    devices: the kinds of device that it computes on.
    compiled: None if compilation was not asked for or, as `uncompiled` says, failed.
    """

    graph: fx.GraphModule
    interface: Interface | Inside
    devices: frozenset[str]
    compiled: Run | None
    uncompiled: str


@dataclass(frozen=True)
class Built:
    """The outcome of building for one graph of Dynamo's, `graph`.

    original: runs that graph.
    restoring: wraps a run so that it leaves the modes as they were, should it raise.
    tensors, devices: the positions of its tensor inputs, and the kinds of device they are on.
    executable: None if the graph is not rewritten.
    """

    graph: fx.GraphModule
    decision: Decision
    original: Run
    restoring: Callable[[Run], Run]
    tensors: tuple[int, ...]
    devices: frozenset[str]
    executable: Executable | None


def build(traced: Traced, decision: Decision, policy: Policy, lists: OpLists) -> Built:
    """Build for one graph. Must be called under the modes in which the graph will run. Raises
    RestartAnalysis if Dynamo is to capture the graph again."""
    lifted = decision.lifted
    restoring = restoring_modes if changes_modes(traced.graph) else _as_it_is
    return Built(
        traced.graph,
        decision,
        restoring(code_of(eager(traced.graph))),
        restoring,
        tuple(i for i, x in enumerate(traced.inputs) if isinstance(x, torch.Tensor)),
        devices_of_inputs(traced.inputs),
        None if lifted is None else _executable(traced, lifted, decision.plan, policy, lists),
    )


def _executable(
    traced: Traced, lifted: Lifted, plan: Plan, policy: Policy, lists: OpLists
) -> Executable:
    graph, widened, early = lifted.graph, frozenset[int](), dict[int, int]()
    if not policy.is_compiled:  # Inductor makes one kernel of a cast and what it reads
        graph, widened, early = let_leave_early(*lift_results(graph))
    by_operator = eager(graph, emulated_nodes(policy, lists))
    compiled, uncompiled = None, ""
    parameters = _parameters_read(lifted.graph, lists)
    if policy.is_compiled:
        parameters = dict.fromkeys(parameters, False)
        try:
            settings = policy.inductor_settings()
            compiled = compile_graph(lifted, by_operator.forward, traced, settings)
        except RestartAnalysis:
            raise
        except Exception as error:
            uncompiled = in_words(error)
    interface = lifted.inside or Interface(
        lifted.weights,
        parameters,
        written_inputs(plan),
        widened,
        early,
        records=_records_some(lifted.graph),
        ends_recording=mode_after(lifted.graph.graph),
    )
    return Executable(by_operator, interface, lifted.devices, compiled, uncompiled)


def written_inputs(plan: Plan) -> frozenset[int]:
    """Return the positions of the inputs that a graph writes to."""
    return frozenset(i for i, f in _inputs_of(plan) if f.written)


def inputs_at_risk(plan: Plan) -> list[int]:
    """Return the positions of inputs that a run may write into: all but parameters, since not every
    schema tells (that of batch_norm does not)."""
    return [i for i, f in _inputs_of(plan) if f.tensors and (f.written or not f.is_parameter)]


def _inputs_of(plan: Plan) -> Iterator[tuple[int, NodeFacts]]:
    return enumerate(f for f in plan.facts.values() if f.op == "placeholder")


def _records_some(module: fx.GraphModule) -> bool:
    """Whether autograd records anything of a graph, as it would be called now."""
    bodies = (m for m in module.children() if isinstance(m, fx.GraphModule))
    return bool(recorded_nodes(module.graph)) or any(map(_records_some, bodies))


def _parameters_read(module: fx.GraphModule, lists: OpLists) -> dict[int, bool]:
    """Return the positions of the parameters that a graph itself reads, each with whether its one
    reader makes a gradient in memory of its own."""
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    read = {i: [*n.users] for i, n in inputs if n.meta.get("is_parameter") and n.users}
    entries = {i: lists.lookup(by[0].target) for i, by in read.items() if len(by) == 1}
    return {i: bool((entry := entries.get(i)) and entry.own_gradients) for i in read}


def _as_it_is(run: Run) -> Run:
    return run
