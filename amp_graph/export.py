"""Export: a model as a program in mixed precision, for deployment.

    what torch.export makes             what becomes of it
    p_weight: float32, x: float32       p_weight: bfloat16, x: float32
                                        x_low  = _to_copy(x, dtype=bfloat16)
    linear = linear(x, p_weight)        linear = linear(x_low, p_weight)
    return linear                       return _to_copy(linear, dtype=float32)

The program needs nothing of this package: it can be saved, compiled ahead of time and handed on.
Weights that it reads in low precision alone are stored in that: nobody trains them any more.

Private names of PyTorch used here:

    ExportedProgram._update                         the same program with another graph
    free_unbacked_symbols, ShapeEnv.var_to_range    sizes that depend on data, and their bounds
    nn.modules.module._global_buffer_registration_hooks
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import AdditionalInputs, ExportedProgram, ShapesCollection
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.modules.module import _global_buffer_registration_hooks as buffer_hooks
from torch.utils._pytree import tree_leaves

from amp_graph.backend.decide import Lifted, Traced, decide
from amp_graph.calls.conversion import policy_and_plans
from amp_graph.calls.convertible import check_initialized
from amp_graph.dynamo_changes.logs import quiet_logs
from amp_graph.errors import AmpGraphError, PolicyError, in_brief, warn
from amp_graph.graphs.aten import CAST
from amp_graph.graphs.fake import fake_mode_of
from amp_graph.graphs.input_names import Names
from amp_graph.modules import unwrapped
from amp_graph.plans.plan_file import PlanSource
from amp_graph.policy import PolicySource
from amp_graph.reasons import why_nothing_is_low

SHAPES = (Mapping, tuple, list, ShapesCollection, AdditionalInputs, type(None))

# torch.export's assertion about the operand of a conversion: its dtype in float32, for one.
ASSERTS_METADATA = torch.ops.aten._assert_tensor_metadata.default


def export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: PolicySource = None,
    plan: PlanSource | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Return what `torch.export.export(model, args, kwargs)` does, in mixed precision. The model,
    which may be converted, is left as it is.

    Inputs, outputs and buffers have the dtypes that they have in the model; a parameter has low
    precision if nothing reads it in another. `policy` and `plan` are those of `convert`, or those
    that the model was converted with. `dynamic_shapes` is torch.export's.

    Warns if nothing of the program is in low precision.

    Raises what `torch.export` raises for a model that it cannot export, PolicyError, ListError and
    PlanError as `convert` does, and AmpGraphError if the program cannot be rewritten or an argument
    is of the wrong kind.
    """
    chosen, saved = policy_and_plans(model, policy, plan)
    check_initialized(model)
    chosen = chosen.uncompiled()
    if chosen.output_dtype is not None:
        raise PolicyError("output_dtype: a program returns the dtypes of the model; leave it out")
    _check_kinds(args, kwargs, dynamic_shapes)
    lists = chosen.load_lists()
    with quiet_logs(), _no_hooks_left():
        exported = torch.export.export(
            unwrapped(model), (*args,), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
    with torch.no_grad():
        traced = _traced(exported)
        names = _names(exported, traced.inputs)
        decision = decide(traced, chosen, lists, saved, names)
    if decision.lifted is None:
        raise AmpGraphError(
            f"cannot export {type(model).__name__} in mixed precision: {decision.plan.fallback}. "
            f"torch.export.export has it in float32"
        )
    if reason := why_nothing_is_low([decision.plan]):
        warn(f"nothing of {type(model).__name__} is in low precision in the program: {reason}")
    return _rewritten(exported, decision.lifted)


@contextlib.contextmanager
def _no_hooks_left() -> Iterator[None]:
    """Where `torch.export` of 2.11 fails it leaves a hook on all modules, which would end the graph
    of each model that writes to a buffer."""
    before = {*buffer_hooks}
    try:
        yield
    finally:
        for key in buffer_hooks.keys() - before:
            del buffer_hooks[key]


def _check_kinds(args: Any, kwargs: Any, dynamic_shapes: Any) -> None:
    if not isinstance(args, (tuple, list)):
        raise AmpGraphError(f"args: takes a tuple, as of one tensor (x,), not {in_brief(args)}")
    if not isinstance(kwargs, Mapping | None):
        raise AmpGraphError(f"kwargs: takes arguments by their names, not {in_brief(kwargs)}")
    if not isinstance(dynamic_shapes, SHAPES):
        raise AmpGraphError(
            "dynamic_shapes: takes what torch.export does, such as {'x': {0: Dim.AUTO}}, not "
            f"{in_brief(dynamic_shapes)}"
        )


def _traced(exported: ExportedProgram) -> Traced:
    """Return a program's graph as Dynamo would hand it over."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.target is ASSERTS_METADATA:
            continue
        new[node] = graph.node_copy(node, new.__getitem__)
        value = node.meta.get("val")
        if kinds.get(node.name) is InputKind.PARAMETER:
            value = nn.Parameter(value, requires_grad=False)
        new[node].meta = {**node.meta, "example_value": value}
    inputs = [new[n].meta["example_value"] for n in exported.graph.find_nodes(op="placeholder")]
    return Traced(fx.GraphModule(exported.graph_module, graph), inputs)


def _names(exported: ExportedProgram, inputs: Sequence[Any]) -> Names:
    """Return the model's names for its modules, by the keys that nodes have, its parameters and
    buffers."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in exported.graph.nodes]
    modules = {key.partition("@")[0]: path for stack in stacks for key, (path, *_) in stack.items()}
    signature = exported.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    given = zip(exported.graph.find_nodes(op="placeholder"), inputs, strict=True)
    stored = {id(x): (n.name, targets[n.name]) for n, x in given if n.name in targets}
    return Names(
        modules,
        {key: target for key, (_, target) in stored.items()},
        buffers={k for k, (name, _) in stored.items() if name in signature.inputs_to_buffers},
    )


def _rewritten(exported: ExportedProgram, lifted: Lifted) -> ExportedProgram:
    """Return the program with the emitted graph, and the weights that it reads."""
    graph, narrowed = _with_weights(lifted)
    inputs: list[Any] = graph.find_nodes(op="placeholder")
    results: Any = graph.output_node().args[0]
    before, state = exported.graph_signature, exported.state_dict
    signature = ExportGraphSignature(
        [*map(_of_node, before.input_specs, inputs)],
        [*map(_of_node, before.output_specs, results)],
    )
    # By the ids of the parameters: of tied ones the graph reads one.
    weights = {
        id(state[target]): _low(state[target], narrowed[name])
        for name, target in signature.inputs_to_parameters.items()
        if name in narrowed
    }
    for node in inputs:
        target = signature.inputs_to_parameters.get(node.name)
        if target is not None and id(state[target]) in weights:
            node.meta["val"] = node.meta["val"].to(weights[id(state[target])].dtype)
    with warnings.catch_warnings():  # PyTorch's, of a class of its own that it copies here
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        program = exported._update(
            fx.GraphModule(lifted.graph, graph),
            signature,
            state_dict={name: weights.get(id(value), value) for name, value in state.items()},
        )
    program.range_constraints.update(_ranges(program))
    return program


def _with_weights(lifted: Lifted) -> tuple[fx.Graph, dict[str, torch.dtype]]:
    """Return the graph with the captured inputs alone, and the dtypes of narrowed parameters by
    name. A parameter becomes its low-precision weight if nothing else reads it, and is cast in the
    graph otherwise."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = lifted.graph.graph.find_nodes(op="placeholder")
    captured = inputs[: len(inputs) - len(lifted.weights)]
    for node in captured:
        new[node] = graph.node_copy(node)
    narrowed: dict[str, torch.dtype] = {}
    for low, (position, dtype) in zip(inputs[len(captured) :], lifted.weights, strict=True):
        parameter = captured[position]
        if parameter.users:
            new[low] = graph.call_function(CAST, (new[parameter],), {"dtype": dtype})
            new[low].meta = dict(low.meta)
        else:
            new[low] = new[parameter]
            narrowed[parameter.name] = dtype
    for node in lifted.graph.graph.nodes:
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    return graph, narrowed


def _ranges(program: ExportedProgram) -> Iterator[tuple[Any, Any]]:
    """Yield the ranges of the sizes that depend on data, by symbol. Each trace has symbols of its
    own for them; without their ranges a saved program cannot be loaded."""
    fake_mode = fake_mode_of(program.graph_module)
    known: Any = fake_mode.shape_env if fake_mode is not None else None
    values = tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    for value in values if known is not None else ():
        if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            for symbol in free_unbacked_symbols(value):
                yield symbol, known.var_to_range[symbol]


def _of_node(spec: Any, node: Any) -> Any:
    """Return the specification of an input or a result by the name of its node. A constant has
    none."""
    if not isinstance(node, fx.Node):
        return spec
    return replace(spec, arg=replace(spec.arg, name=node.name))


def _low(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
