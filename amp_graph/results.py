"""What a model returns, with the tensors in it mapped.

They are in containers, those that are registered with PyTorch as such included, in the fields of
dataclasses, and in what describes a distribution. What these hold may lead back to them: a node of
a tree may know its parent.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributions import Distribution
from torch.utils._pytree import tree_is_leaf, tree_leaves, tree_map

# Containers that can be copied first and filled then, and so may hold themselves.
_FILLED = (list, dict, OrderedDict, defaultdict, deque)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """A model's result with `function` applied to the tensors in it, once to each. What leads to a
    tensor that changed is copied, and the copies lead to each other as before; all else stays."""
    return _Mapped(function).of(result)


class _Mapped:
    """Not functions within a function: these would refer to each other, and keep every result, and
    what autograd keeps for it, until Python's collector comes."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self._function = function
        # By its id what was mapped, kept alive, and to what.
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            new: Any = self._function(value)
        elif not any(self.of(tensor) is not tensor for tensor in _tensors_in(value)):
            new = value
        elif type(value) in _FILLED:
            new = self._put(value, copy.copy(value))
            for key in value if isinstance(value, dict) else range(len(value)):
                new[key] = self.of(value[key])
        elif tree_is_leaf(value):  # a distribution, or a dataclass, which may be frozen
            new = self._put(value, copy.copy(value))
            for name in _fields(value):
                object.__setattr__(new, name, self.of(getattr(value, name)))
        else:
            new = tree_map(self.of, value, is_leaf=lambda each: each is not value)
        return self._put(value, new)

    def _put(self, value: Any, new: Any) -> Any:
        # A tuple in a list that it holds was mapped when that was.
        return self._known.setdefault(id(value), (value, new))[1]


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            yield each
        else:
            waiting += _parts(each)


def _parts(value: Any) -> Iterable[Any]:
    """What is directly in a container, a dataclass or a distribution."""
    if type(value) in _FILLED:
        return value.values() if isinstance(value, dict) else value
    if not tree_is_leaf(value):
        return tree_leaves(value, is_leaf=lambda each: each is not value)
    return [getattr(value, name) for name in _fields(value)]


def _fields(value: Any) -> list[str]:
    if isinstance(value, Distribution):
        return [*vars(value)]
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return []
    return [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
