"""Writes: which operators of Dynamo's graph write into the memory of its values."""

from __future__ import annotations

import operator
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from amp_graph.graphs.aten import mutated_operands

NAMES = vars(operator).keys()
OPERATORS = {n for n in NAMES if n.startswith("i") and {n[1:], f"{n[1:]}_"} & NAMES}  # iadd, iand
IN_PLACE = {"setitem", *OPERATORS, "__setitem__", *(f"__{n}__" for n in OPERATORS)}
PURE = {"and_", "or_", "not_", "is_"}  # Python's words


def writes_by_memory(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Return the nodes that write into each memory that values have."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in _written(node):
            if memory(operand):
                found.setdefault(memory(operand), []).append(node)
    return found


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node writes into: by its schema, if it has one, else by its name and
    arguments."""
    if isinstance(node.target, OpOverload):
        return mutated_operands(node)
    given = [node.kwargs.get("out"), *(node.args[:1] if _is_in_place(node) else ())]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, fx.Node)]


def _is_in_place(node: fx.Node) -> bool:
    target: Any = node.target
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    is_named = name.endswith("_") and not name.endswith("__") and name not in PURE
    if node.op != "placeholder" and (is_named or name in IN_PLACE):
        return True
    told = node.kwargs.get("inplace")
    if any(each is True for each in node.args) and isinstance(target, FunctionType):
        told = dict(zip(signature(target).parameters, node.args, strict=False)).get("inplace", told)
    return told is True


def memory(node: fx.Node) -> int:
    """Return a key of the memory that a value lives in; 0 if it has none of its own."""
    value = node.meta.get("example_value")
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_nested:
        return 0
    return int(value.untyped_storage()._cdata)


def is_as_made(node: fx.Node) -> bool:
    """Whether the value is as this node returned it, as far as the graph goes by now."""
    place = memory(node)
    return place != 0 and writes_by_memory(node.graph).get(place, [node]) == [node]
