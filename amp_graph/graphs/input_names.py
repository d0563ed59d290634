"""The names by which people know the inputs of a graph.

    L['module']._modules['head']._parameters['weight']      head.weight
    L['args'][1]['mask'], of forward(self, x, batch)        batch['mask']

Dynamo names each by where it found it, in letters that an identifier may have.

Private names of PyTorch used here; seen to work on 2.11 and 2.13 to 2.15:

    Node._dynamo_source, its name    where Dynamo found an input (a method before 2.13)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from amp_graph.graphs.aten import bodies_of

BUFFER = re.compile(r".*\._buffers\['(?:[^'\\]|\\.)*'\]")  # where Dynamo found one
PARTS = re.compile(r"\._(?:modules|parameters|buffers)\['((?:[^'\\]|\\.)*)'\]")


@dataclass(frozen=True)
class Names:
    """The names that a model's code has for modules, parameters, buffers and arguments.

    modules: module paths by id as a string, which is how Dynamo refers to a module.
    stored: the paths of parameters and buffers by id.
    buffers: the ids of the buffers among them.
    arguments: for a graph that begins with a call of the model, its arguments by position; else
        None.
    rest: the name of the argument that holds all further ones.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[int, str] = field(default_factory=dict)
    arguments: Sequence[str] | None = None
    rest: str = "args"
    buffers: Collection[int] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, called: Any = None) -> Names:
        """Collect the names of a model. `called`: the method that a graph begins with, if any."""
        modules = {str(id(module)): path for path, module in model.named_modules()}
        buffers = {id(tensor): path for path, tensor in nn.Module.named_buffers(model)}
        parameters = {id(tensor): path for path, tensor in nn.Module.named_parameters(model)}
        stored = buffers | parameters
        return cls(modules, stored, *_signature(called), buffers=buffers.keys() - parameters.keys())

    def of_inputs(self, module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, str]:
        """Return the model's names for the inputs of a graph of Dynamo's, by their names in the
        graph. `inputs`: what the graph is called with."""
        placeholders = module.graph.find_nodes(op="placeholder")
        found = {n.name: self._spelled(n) for n in placeholders}
        stored = ((n, self.stored.get(id(x))) for n, x in zip(placeholders, inputs, strict=False))
        return found | {n.name: path for n, path in stored if path is not None}

    def buffers_of(self, module: fx.GraphModule, inputs: Sequence[Any]) -> set[str]:
        """Return the inputs of such a graph that are buffers."""
        placeholders = module.graph.find_nodes(op="placeholder")
        known = {
            n.name for n, x in zip(placeholders, inputs, strict=False) if id(x) in self.buffers
        }
        return known | {n.name for n in placeholders if BUFFER.fullmatch(_source(n))}

    def _spelled(self, node: fx.Node) -> str:
        where = re.fullmatch(r"[LG]\['(\w+)'\](.*)", _source(node))
        if where is None:
            return node.name
        root, rest = where.groups()
        if PARTS.search(rest):
            return PARTS.sub(r".\1", rest).removeprefix(".")
        if root.startswith("__import_"):
            return str(rest.removeprefix("."))
        return f"{root}{rest}" if self.arguments is None else self._given(root, rest)

    def _given(self, root: str, rest: str) -> str:
        """Return the model's name for an argument, as `forward` of `CapturedCode` gets it."""
        position, keyword = re.match(r"\[(\d+)\]", rest), re.match(r"\['(\w+)'\]", rest)
        if root == "args" and position is not None:
            return f"{self._argument(int(position[1]))}{rest[position.end() :]}"
        if root == "kwargs" and keyword is not None:
            return f"{keyword[1]}{rest[keyword.end() :]}"
        return rest.removeprefix(".") if root == "module" else f"{root}{rest}"

    def _argument(self, position: int) -> str:
        names = self.arguments or ()
        return names[position] if position < len(names) else f"{self.rest}[{position - len(names)}]"


def call_inputs(module: fx.GraphModule, names: Mapping[str, str], buffers: Collection[str]) -> None:
    """Note the names of the inputs of a graph, and of graphs inside it, in their meta as `called`,
    and whether they are buffers."""
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            node.meta.update(called=names[node.name], is_buffer=node.name in buffers)
        for body in bodies_of(module, node).values():
            call_inputs(body, names, buffers)


def _source(node: fx.Node) -> str:
    """Return where Dynamo found an input, in Python."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    return str(name() if callable(name) else name)


def _signature(function: Any) -> tuple[list[str] | None, str]:
    """Return the names of a function's positional arguments, and the name that holds any further
    ones."""
    if function is None:
        return None, "args"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], "args"
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in by_position], rest
