"""Inductor: compile an emitted graph.

    x, w  ----> compiled forward ----> y            one AOTAutograd trace of both,
    dx, dw <--- compiled backward <--- dy           cached by PyTorch across processes

A low-precision weight that stands apart is an input: `w_bfloat16`, and `dw_bfloat16` comes out. A
loss scale is one, too, with operators that multiply gradients by it (`boundary.inner_scaling`).

This happens inside of Dynamo's call of its backend, where `torch.compile` calls Inductor as well:
guards, symbolic sizes and fake tensors are those of that capture. The boundary of the graph, where
weights that are kept are refreshed and gradients checked, stays outside.

Names of PyTorch used here that are not documented:

    torch._inductor.compile_fx.compile_fx     the documentation of backends names it
    torch._functorch.config                   the two settings below
    torch._functorch._aot_autograd.graph_compile.collect_bw_donated_buffer_idxs
        which saved tensors a compiled backward may write over
    GraphModule.meta["dynamo_compile_id"], ._param_name_to_source, Node._dynamo_source,
    Node.meta["tensor_dict"]["_dynamo_static_input_type"]
        how Dynamo tells AOTAutograd where inputs come from, to guard that they are distinct, and
        which stay at one address (CUDA graphs)
    torch._dynamo.source.ConstantSource       where an input of ours comes from
    CompiledFunction, CompiledFunctionBackward, and _forward_cls of their nodes
        the custom autograd functions that AOTAutograd makes for a forward and for its backward
        (seen to work on 2.13); by other names a second derivative is PyTorch's own error
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.autograd import Function
from torch.autograd.graph import Node

from amp_graph.backend.decide import Lifted, Traced
from amp_graph.dynamo_changes.slow_sizes import untimed
from amp_graph.errors import CaptureError, DerivativeError
from amp_graph.graphs.aten import RECURRENT, has_any_inside, set_data
from amp_graph.modules import Run
from amp_graph.outer_autocast import without_autocast
from amp_graph.patching import method_inside

# All casts are in the graph, those of its backward as well. And a backward that cannot be compiled
# is to fail at once, where there is a way back.
SETTINGS = {"backward_pass_autocast": "off", "force_non_lazy_backward_lowering": True}

NO_SECOND_DERIVATIVE = (
    "a compiled graph has no second derivative, as a gradient penalty (create_graph=True) takes "
    'it; set compiler="eager", or AMP_GRAPH_COMPILER=eager in the environment'
)

STATIC = {"_dynamo_static_input_type": "unguarded"}  # marks an input that stays at its address


def compile_graph(
    lifted: Lifted, eager: Run, traced: Traced, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a lifted graph, compiled, as a function of the same inputs. The graph stays as it was.

    eager: runs it operator by operator.
    traced: the graph and inputs that Dynamo called its backend with.
    settings: Inductor's settings.
    """
    if lifted.graph.graph.find_nodes(op="call_function", target=set_data):  # at once, as it traces
        raise CaptureError("tensors are put into other memory (`x.data = y`)")
    if has_any_inside(lifted.graph, RECURRENT):
        raise CaptureError("Inductor would unroll a recurrent layer, for each length anew")
    module = _described(copy.deepcopy(lifted.graph), traced.graph)
    inputs = [*traced.inputs]
    placeholders = module.graph.find_nodes(op="placeholder")
    trained = [traced.inputs[position].requires_grad for position, _ in lifted.weights]
    if lifted.inside is not None:
        trained += [False] * len(lifted.inside.devices) + [True]
    for node, is_trained in zip(placeholders[len(inputs) :], trained, strict=True):
        node.meta = {**node.meta, "tensor_dict": STATIC}
        # As the boundary will hand it in: the fake was made without autograd.
        inputs.append(node.meta["val"].detach().requires_grad_(is_trained))
    read = _without_unread_parameters(module.graph)
    module.recompile()
    compiled = without_autocast(inductor, lifted.devices)(
        module, [inputs[i] for i in read], config_patches=dict(settings)
    )
    run = _differentiable_once(compiled)
    frozen = [
        i
        for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if (node.meta.get("is_parameter") or "weight_of" in node.meta) and not value.requires_grad
    ]

    def run_on_what_is_read(*args: Any) -> Any:
        if any(args[i].requires_grad for i in frozen):  # seen in 2.11: Dynamo does not notice
            return eager(*args)
        return run(*[args[i] for i in read])

    return run_on_what_is_read


def _differentiable_once(run: Run) -> Run:
    """Return the compiled run with PyTorch's own error for a second derivative replaced by one that
    says what to do."""
    is_known = False

    def run_once_known(*args: Any) -> Any:
        nonlocal is_known
        results = run(*args)
        if not is_known and torch.is_grad_enabled():
            node: Any = _compiled_node(results)
            if node is not None:
                is_known, kind = True, node._forward_cls
                kind.backward = staticmethod(_refusing_another(kind.backward))
        return results

    return run_once_known


def _refusing_another(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward pass of a compiled function. What it returns, if recorded, raises when it
    is differentiated, also by leaves to which PyTorch knows no way: it would say that the
    derivative is 0."""

    def differentiable_once(ctx: Any, *gradients: Any) -> Any:
        found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        leaves = [*_leaves_behind(ctx)]
        apply: Any = _Once.apply
        return tuple(apply(g, *leaves) if isinstance(g, Tensor) else g for g in found)

    return differentiable_once


class _Once(Function):
    """A gradient that has no derivative. It depends on `leaves`."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *leaves: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DerivativeError(NO_SECOND_DERIVATIVE)


def _leaves_behind(node: Any) -> Iterator[Tensor]:
    """Yield the leaves at which gradients end that go on from an autograd node."""
    waiting, seen = [node], set()
    while waiting:
        for before, _ in waiting.pop().next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
                if (leaf := getattr(before, "variable", None)) is not None:
                    yield leaf


def _compiled_node(tensors: Iterable[Any]) -> Node | None:
    """Return the autograd node of AOTAutograd's that made one of the tensors, or the base of one;
    None if there is none."""
    for tensor in tensors:
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        for found in (node, *(before for before, _ in (node.next_functions if node else ()))):
            if found is not None and found.name().startswith("CompiledFunction"):
                return found
    return None


def inductor(module: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Inductor, as a backend for `torch.compile`, with SETTINGS.

    PyTorch waits for the first backward pass to know whether its graph is kept (`retain_graph`). A
    backward pass compiled before that writes over nothing that was saved, so that the graph may be
    kept.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor.compile_fx import compile_fx

    with (
        config.patch(SETTINGS),
        method_inside(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: []),
        untimed(),  # it compiles slowly whether or not sizes vary
    ):
        return compile_fx(module, inputs, **options)


def _without_unread_parameters(graph: fx.Graph) -> list[int]:
    """Remove the inputs for parameters that only their low-precision weights stand for, as each
    input of a compiled graph costs time at every call. Returns the positions of the others."""
    read = []
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if node.users or not node.meta.get("is_parameter"):
            read.append(position)
        else:
            graph.erase_node(node)
    return read


def _described(module: fx.GraphModule, captured: fx.GraphModule) -> fx.GraphModule:
    """Return `module` with Dynamo's notes on the graph that it was made from."""
    if "dynamo_compile_id" not in captured.meta:
        return module
    module.meta["dynamo_compile_id"] = captured.meta["dynamo_compile_id"]
    constants = [name for name, _ in module.named_parameters()]
    constants += [name for name, _ in module.named_buffers()]
    sources: Any = {name: ConstantSource(name) for name in constants}
    module._param_name_to_source = sources
    known = {n.name: n for n in captured.graph.find_nodes(op="placeholder")}
    for node in module.graph.find_nodes(op="placeholder"):
        described: Any = node
        described._dynamo_source = getattr(known.get(node.name), "_dynamo_source", None)
    return module
