"""Which operators of Dynamo's graph write into the memory of its values."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

NAMES = vars(operator).keys()
OPERATORS = {n for n in NAMES if n.startswith("i") and {n[1:], f"{n[1:]}_"} & NAMES}  # iadd, iand
IN_PLACE = {"setitem", *OPERATORS, "__setitem__", *(f"__{n}__" for n in OPERATORS)}
PURE = {"and_", "or_", "not_", "is_"}  # Python's words


def writes_by_memory(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By the memory of values, the nodes that by their names write into it."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        target: Any = node.target
        name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
        operand: Any = node.kwargs.get("out")
        is_named = name.endswith("_") and not name.endswith("__") and name not in PURE
        is_named = is_named or name in IN_PLACE
        if node.op != "placeholder" and (is_named or node.kwargs.get("inplace") is True):
            operand = next(iter(node.args), None)
        if isinstance(operand, fx.Node) and memory(operand):
            found.setdefault(memory(operand), []).append(node)
    return found


def memory(node: fx.Node) -> int:
    """A key of the memory that a value lives in, 0 if it has none of its own."""
    value = node.meta.get("example_value")
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_nested:
        return 0
    return int(value.untyped_storage()._cdata)


def is_as_made(node: fx.Node) -> bool:
    """Whether the value is as this node returned it, as far as the graph goes by now."""
    place = memory(node)
    return place != 0 and writes_by_memory(node.graph).get(place, [node]) == [node]
