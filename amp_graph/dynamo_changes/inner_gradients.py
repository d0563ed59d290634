"""Where a model asks for a gradient by a value of its own, its graph ends at that value as well.

    h, u = graph(x)                                h = graph_0(x)
    autograd.grad(u.sum(), h)          ->          u = graph_1(h)
                                                   autograd.grad(u.sum(), h)

So do networks of forces and of equations, energies, and inner steps of meta-learning. Dynamo ends
the graph at the call, with both as results. But `u` is not made of what leaves the graph as `h`: it
is made of what `h` was before it was widened, or before it crossed the boundary where gradients are
scaled, and a compiled graph has one gradient function for all results. So the gradient would be an
error, or None with `allow_unused`. For that reason Dynamo 2.15 leaves such a function to Python.
Here it is captured, in parts.

Each part of a graph costs a little time, so only models whose code takes gradients are cut, and
graphs that end where one is taken.

Private names of PyTorch used here:

    GraphModule.compile_subgraph_reason      why a graph ended, as in `breaks`
    torch.ops.higher_order.register_hook     a hook in a graph

and since 2.15:

    torch._dynamo.variables.tensor._contains_graph_intermediate
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.has_live_graph_intermediate
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import tensor as of_tensors
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from amp_graph.dynamo_changes.replaced import existing
from amp_graph.errors import CaptureError
from amp_graph.graphs.cuts import run_in_parts
from amp_graph.graphs.lines import called_at
from amp_graph.graphs.vmap import begins_of_transforms
from amp_graph.graphs.writes import memory, writes_by_memory
from amp_graph.modules import Run

ENDED_AT = re.compile(r"autograd\.grad|\bbackward\(|\bretain_grad\(")
TAKING = {"backward", "retain_grad"}
LIBRARIES = ("torch", "numpy", "builtins")  # take no gradient by a value of the model's
MANY = 1000  # functions that are looked at
CHANGES = existing(  # to capture what is around such a call, for `compile_in_parts`
    (of_tensors, "_contains_graph_intermediate", lambda *_, **__: False),
    (InstructionTranslatorBase, "has_live_graph_intermediate", lambda *_, **__: False),
)


def compile_in_parts(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    compile_graph: Callable[[fx.GraphModule, list[Any]], Run],
    model: nn.Module | None = None,
) -> Run:
    """Compile a graph of Dynamo's by `compile_graph`: whole, or in parts where a gradient may be
    asked for by one of its results. `model`: the model it is of, if known. Raises CaptureError if
    such a result has a hook: Dynamo has it run where the result is made, which is not reached then.
    """
    before = cuts(module.graph)
    hooked = [*filter(_is_hooked, module.graph.output_node().all_input_nodes)]
    is_plain = not before and not hooked
    if is_plain or not (_ends_at_gradient(module) or (model and takes_gradients(model))):
        return compile_graph(module, [*inputs])
    if hooked:
        raise CaptureError(f"'{hooked[0].name}' has a hook, and a gradient may be taken by it")
    return run_in_parts(module, inputs, before, compile_graph)


def _is_hooked(node: fx.Node) -> bool:
    """By the operator that Dynamo has for a hook; 2.11 has a custom function, written at the line
    where the hook is."""
    frame = called_at(node)
    line = (frame and frame.line) or ""
    return "register_hook" in str(node.target) or "register_hook(" in line


def _ends_at_gradient(module: fx.GraphModule) -> bool:
    ending: Any = getattr(module, "compile_subgraph_reason", None)
    if not getattr(ending, "graph_break", False):
        return False
    said = [str(ending.reason), *(frame.line or "" for frame in ending.user_stack)]
    return any(map(ENDED_AT.search, said))


def cuts(graph: fx.Graph) -> list[fx.Node]:
    """Before which nodes a graph has to end, so that no part returns a result and another one that
    is made of it, where both require gradients. As few as do: a part goes on up to the first node
    that reads one of the results before it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    written = writes_by_memory(graph)
    results = [n for n in graph.output_node().all_input_nodes if _requires_grad(n)]
    results = [n for n in results if n.op not in ("placeholder", "get_attr")]
    inputs = [n for n in graph.find_nodes(op="placeholder") if memory(n) in written]
    results += filter(_requires_grad, inputs)  # as they are afterwards
    if len(results) < 2:
        return []
    leading = _leading_to(results, written)
    # A result is there, as it is returned, when it was last written to.
    done = {n: max(map(place.__getitem__, [n, *written.get(memory(n), ())])) for n in results}
    done |= {n: done[x] for x in inputs if x in done for n in place if memory(n) == memory(x)}
    begins = begins_of_transforms(graph)
    found: list[fx.Node] = []
    since = -1
    for node in filter(leading.__contains__, graph.nodes):
        cut = begins.get(node, node)  # which no transform goes on across
        end = place[cut]
        if any(since <= done.get(n, end) < end for n in node.all_input_nodes):
            found.append(cut)
            since = end
    return found


def _leading_to(results: list[fx.Node], written: Mapping[int, list[fx.Node]]) -> set[fx.Node]:
    """The nodes that require a gradient and that one of these results is made of, or is, and those
    that write into them."""
    found: set[fx.Node] = set()
    new = [*results]
    seen: set[fx.Node] = set()
    while new:
        node = new.pop()
        if node not in seen and _requires_grad(node):
            seen.add(node)
            writes = written.get(memory(node), ())
            found.update([node, *writes])
            new += [n for each in (node, *writes) for n in each.all_input_nodes]
    return found


def _requires_grad(node: fx.Node) -> bool:
    values = [v for v in tree_leaves(node.meta.get("example_value")) if isinstance(v, Tensor)]
    # Tensors of a transform that has ended say no, whatever they said inside it.
    return any(v.requires_grad or not isinstance(v, FakeTensor) for v in values)


def takes_gradients(model: nn.Module) -> bool:
    """Whether a `forward` of the model's classes, or a function or method that one reaches by name
    or that a module holds, takes gradients itself."""
    modules = [*model.modules()]
    methods: dict[str, list[Any]] = {}
    for kind in {kind for module in modules for kind in type(module).__mro__}:
        for name, value in vars(kind).items():
            methods.setdefault(name, []).append(value)
    new = [*methods["forward"], *(f for module in modules for f in vars(module).values())]
    seen: set[types.FunctionType] = set()
    while new and len(seen) < MANY:
        function = _plain(new.pop())
        if function is None or function in seen or _is_library(function.__module__):
            continue
        seen.add(function)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        reached = [*_reached(function.__globals__, names)]
        if {"autograd", "grad"} <= names or names & TAKING or torch.autograd.grad in reached:
            return True
        new += [*reached, *(f for name in names for f in methods.get(name, ()))]
    return False


def _plain(value: Any) -> types.FunctionType | None:
    """The function behind a method or property, or behind what wraps it."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    found = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
    return found if isinstance(found, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _reached(known: Mapping[str, Any], names: set[str]) -> Iterator[types.FunctionType]:
    """The functions that go by these names here, or in a Python module that does."""
    for name in names & known.keys():
        values = [known[name]]
        if isinstance(known[name], types.ModuleType) and not _is_library(known[name].__name__):
            values = [vars(known[name]).get(n) for n in names]
        yield from (v for v in values if isinstance(v, types.FunctionType))


def _is_library(module_name: Any) -> bool:
    return str(module_name).partition(".")[0] in LIBRARIES
