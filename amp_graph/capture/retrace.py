"""Retrace a Dynamo graph to ATen, one spelling per operator, autograd still above it.

    torch-level                          ATen
    h = torch.relu(x)                    relu   = aten.relu.default(x)
    y = h.matmul(w)                      matmul = aten.matmul.default(relu, w)
    z = wrap_body_0(checkpoint, y)       wrap_body_0(checkpoint, matmul)

A node that changes a mode (grad, autocast, the kernels allowed for attention), takes `.data` of
a tensor, or holds a graph of its own (checkpoint, cond, a custom autograd function) passes through
as it is, and its body is retraced in its own right. Inference mode is spelled as `no_grad`.
The stretches between such nodes are traced by `make_fx(pre_dispatch=True)` on the fake tensors
that Dynamo left in `meta["example_value"]`, under the modes in force at that place.

Private names of PyTorch used here:

    torch.nn.attention._sdpa_kernel, _cur_sdpa_kernel_backends, _backend_from_string
                                how Dynamo spells the kernels allowed, and which are
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import (
    _backend_from_string,
    _cur_sdpa_kernel_backends,
    _sdpa_kernel,
    sdpa_kernel,
)

from amp_graph.capture.autocast_regions import mark_bodies, region_of
from amp_graph.dynamo_changes.numpy_numbers import unread_numbers
from amp_graph.dynamo_changes.tensor_indices import as_read_by
from amp_graph.errors import CaptureError, in_words
from amp_graph.graphs.assignments import assignments
from amp_graph.graphs.aten import (
    ASKS_FOR_LOW,
    DATA,
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SELECTIVE,
    SET_DATA,
    SET_GRAD_ENABLED,
    WHY_NOT_RETRACED,
    get_attribute,
    has_any_inside,
    module_path,
    set_attribute,
    tensors_of,
)
from amp_graph.graphs.decompositions import DECOMPOSITIONS, moved
from amp_graph.graphs.fake import any_sizes, fake_mode_of, held_otherwise
from amp_graph.graphs.grad_modes import INFERENCE_MODE, grad_modes
from amp_graph.graphs.hidden_memory import hidden_memory
from amp_graph.graphs.input_names import Names, call_inputs
from amp_graph.graphs.side_by_side import join_parts
from amp_graph.graphs.vmap import all_left, drop_unused_detaches, inside_vmap

KERNEL_CHOICE = (_sdpa_kernel, _backend_from_string)
MODE_SETTERS = (SET_GRAD_ENABLED, ENTER_AUTOCAST, EXIT_AUTOCAST, *INFERENCE_MODE, *KERNEL_CHOICE)


def changes_modes(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's, or one inside it, turns recording, autocast and the like off and
    on again."""
    return has_any_inside(module, MODE_SETTERS)


def retrace(
    module: fx.GraphModule, names: Names | None, inputs: Sequence[Any] = ()
) -> fx.GraphModule:
    """Return the ATen form of a Dynamo graph; `module` is left as it was.

    Every node of the result has `meta["val"]` (fake tensors), `meta["module_path"]` and
    `stack_trace`, an input `meta["called"]` and `meta["is_buffer"]`. Without `names`, a graph of a
    part of the model spells paths from there on, or not at all. `inputs` are what it is called
    with, if that is known. Raises CaptureError where it cannot be traced.
    """
    if ASKS_FOR_LOW in module.meta:
        asking = module.meta[ASKS_FOR_LOW]
        raise CaptureError(f"'{asking}' asks for a dtype that code under autocast had returned")
    names = names or Names()
    retracer = _Retracer(module, names, inputs)
    try:
        traced = retracer.run()
    finally:
        retracer.leave_autocast()
    call_inputs(traced, names.of_inputs(module, inputs), names.buffers_of(module, inputs))
    for node in traced.graph.nodes:
        node.meta["module_path"] = module_path(node, names.modules)
        for kind in filter(None, map(held_otherwise, tensors_of(node))):
            raise CaptureError(f"{node.meta.get('called', node.name)} is {kind}")
    mark_bodies(traced)
    return join_parts(traced)


def trace(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """Capture a plain function of tensors as an ATen graph, without Dynamo."""
    tracer = make_fx(function, DECOMPOSITIONS, pre_dispatch=True, tracing_mode="fake")
    with fx_traceback.preserve_node_meta():
        graph_module: fx.GraphModule = tracer(*args)
    return graph_module


def passes_through(node: fx.Node) -> bool:
    """Whether the node is copied as it is rather than traced."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if _is_higher_order(node) or node.target is DATA or node.target in MODE_SETTERS:
        return True
    return node.target is operator.getitem and _is_higher_order(node.args[0])


def _is_higher_order(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.target, HigherOrderOperator)


class _Retracer:
    """A retrace. `new` maps a node of the old graph to its node (or constant) in the new one,
    `fake` to its value on fake tensors; both hold for all nodes visited so far."""

    def __init__(self, module: fx.GraphModule, names: Names, inputs: Sequence[Any]):
        self.module = module
        self.names = names
        self.assignments = assignments(module.graph, inputs)
        self.left_out = {*self.assignments.dropped, *unread_numbers(module.graph)}
        self.autocasts: list[Any] = []  # the autocast regions that the trace is inside of
        self.grad_modes = grad_modes(module.graph)
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.fake: dict[fx.Node, Any] = {}
        self.seen: set[int] = set()  # ids of the values of inputs
        self.fake_mode = fake_mode_of(module)

    def run(self) -> fx.GraphModule:
        stretch: list[fx.Node] = []
        mapped, is_mapped = inside_vmap(self.module.graph), False
        grad_as_called = torch.set_grad_enabled(torch.is_grad_enabled())
        kernels_as_called = sdpa_kernel(_cur_sdpa_kernel_backends())
        with grad_as_called, kernels_as_called, self.fake_mode or contextlib.nullcontext():
            for node in self.module.graph.nodes:
                if node in self.left_out:
                    continue
                stays = passes_through(node) or node in self.assignments.moved
                if stays or (node in mapped) != is_mapped:
                    self.trace_stretch(stretch, is_mapped)
                    stretch, is_mapped = [], node in mapped
                if not stays:
                    stretch.append(node)
                elif is_mapped:
                    raise CaptureError(f"'{node.name}' is inside of a vmap")
                elif node in self.assignments.moved:
                    self.assign(node, *self.assignments.moved[node])
                else:
                    self.copy(node)
        traced = fx.GraphModule(self.root, self.graph, class_name="AtenGraph")
        for complaint in hidden_memory(traced):
            raise CaptureError(complaint)
        if SELECTIVE in self.module.meta:
            traced.meta[SELECTIVE] = self.module.meta[SELECTIVE]
        return traced

    def copy(self, node: fx.Node) -> None:
        if node in self.grad_modes:
            new = self.graph.call_function(SET_GRAD_ENABLED, (self.grad_modes[node],))
            new.meta = dict(node.meta)
        else:
            new = self.graph.node_copy(node, lambda arg: self.new[arg])
        self.new[node] = new
        if node.op == "output":
            return
        self.fake[node] = new.meta["val"] = value = self.value_of(node)
        new.meta["is_parameter"] = isinstance(value, torch.nn.Parameter)

    def assign(self, node: fx.Node, x: fx.Node, y: fx.Node) -> None:
        """Put an input into the memory of a value, which is read in its place from here on."""
        given = next(n for n in self.graph.find_nodes(op="placeholder") if n.name == x.name)
        new = self.graph.call_function(SET_DATA, (given, self.new[y]))
        new.meta = {"stack_trace": node.stack_trace, "val": None}
        self.fake[x] = DATA(self.fake[y])
        self.new[x] = self.graph.call_function(DATA, (self.new[y],))
        self.new[x].meta = {"stack_trace": node.stack_trace, "val": self.fake[x]}

    def value_of(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.attribute(node)
        if node.target is ENTER_AUTOCAST:
            self.autocasts.append(ENTER_AUTOCAST(*node.args))
            return self.autocasts[-1]
        if node.target is EXIT_AUTOCAST:
            return EXIT_AUTOCAST(self.autocasts.pop())
        if node in self.grad_modes:
            return SET_GRAD_ENABLED(self.grad_modes[node])
        if node.target in KERNEL_CHOICE:
            return node.target(*fx.node.map_arg(node.args, lambda n: self.fake[n]))
        if node.target is DATA:
            return DATA(self.fake[node.all_input_nodes[0]])
        if node.target is operator.getitem:
            return self.fake[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.op == "placeholder":
            return self.input(node)
        if "example_value" not in node.meta:
            raise CaptureError(f"cannot retrace '{node.name}': its value was not captured")
        return node.meta["example_value"]

    def input(self, node: fx.Node) -> Any:
        """Return the value of an input, each with a tensor of its own: for the backward of a custom
        autograd function Dynamo describes a gradient and a saved tensor by one, if they are alike.
        """
        if "example_value" not in node.meta and not node.users:
            return None  # Dynamo 2.11 leaves it out
        value = node.meta["example_value"]
        if isinstance(value, torch.Tensor) and id(value) in self.seen:
            return torch.empty_like(value, requires_grad=value.requires_grad)
        self.seen.add(id(value))
        return value

    def leave_autocast(self) -> None:
        """Leave the regions that a failed trace did not get out of."""
        while self.autocasts:
            EXIT_AUTOCAST(self.autocasts.pop())

    def attribute(self, node: fx.Node) -> Any:
        value = get_attribute(self.module, str(node.target))
        if isinstance(value, fx.GraphModule):
            self.root.add_module(str(node.target), _retrace_body(value, self.names, node.users))
            return None
        set_attribute(self.root, str(node.target), value)
        return self.as_fake(value)

    def as_fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or self.fake_mode is None:
            return value
        return value if isinstance(value, FakeTensor) else self.fake_mode.from_tensor(value)

    def trace_stretch(self, stretch: list[fx.Node], is_mapped: bool) -> None:
        """Trace nodes in a row. `is_mapped`: of a vmap, to be captured below autograd."""
        if not stretch:
            return
        inside = set(stretch)
        read = (value for node in stretch for value in node.all_input_nodes)
        inputs = [*dict.fromkeys(value for value in read if value not in inside)]
        outputs = [n for n in stretch if any(user not in inside for user in n.users)]
        results: list[Any] = []

        def run(*values: Any) -> list[Any]:
            interpreter = fx.Interpreter(self.module)
            interpreter.env = dict(zip(inputs, values, strict=True))
            with fx_traceback.preserve_node_meta():
                for node in stretch:
                    value = moved(node, interpreter.env)
                    interpreter.env[node] = interpreter.run_node(node) if value is None else value
            results[:] = [interpreter.env[node] for node in outputs]
            return list(results)

        above = not is_mapped
        tracer = make_fx(run, DECOMPOSITIONS, pre_dispatch=above, _allow_non_fake_inputs=True)
        with all_left(), any_sizes(self.fake_mode):
            traced = tracer(*(self.fake[node] for node in inputs))
        if is_mapped:
            drop_unused_detaches(traced.graph)
        self.inline(traced, inputs, outputs)
        self.fake.update(zip(outputs, results, strict=True))

    def inline(self, traced: fx.GraphModule, inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
        local: dict[fx.Node, Any] = {}
        arguments = iter(inputs)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                local[node] = self.new[next(arguments)]
            elif node.op == "output":
                for old, result in zip(outputs, node.args[0], strict=True):
                    self.new[old] = fx.node.map_arg(result, lambda n: local[n])
            else:
                local[node] = self.graph.node_copy(node, lambda n: local[n])
                if node.op == "get_attr":
                    local[node].target = name = f"{node.target}_{len(self.graph.nodes)}"
                    value = get_attribute(traced, node.target)
                    set_attribute(self.root, name, value)
                    local[node].meta["val"] = self.as_fake(value)


def _retrace_body(body: fx.GraphModule, names: Names, users: Iterable[fx.Node]) -> fx.GraphModule:
    """Retrace a body. One that cannot be retraced runs as it is. `users`: the nodes that run it."""
    try:
        with as_read_by(users), region_of(users):
            return retrace(body, names)
    except Exception as error:
        body.meta[WHY_NOT_RETRACED] = in_words(error)
        return body
