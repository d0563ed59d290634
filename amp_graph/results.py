"""Map the tensors in a model's result.

Searched are containers, registered pytree nodes, and the attributes of objects such as dataclasses
and distributions; not modules, functions and other callables. There may be cycles: a node of a tree
may know its parent.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_is_leaf, tree_leaves, tree_map

# Containers that can be copied first and filled then, and so may hold themselves.
_FILLED = (list, dict, OrderedDict, defaultdict, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # in which there is no tensor


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """Return a model's result with `function` applied once to each tensor in it. Objects on the way
    to a changed tensor are copied, and the copies refer to each other as before; all else stays."""
    return _Mapped(function).of(result)


class Given:
    """The arguments of a call. Its tensors belong to the caller, and so do lists and dictionaries,
    into which the model may put others. Lists of objects that may hold tensors are treated as
    results."""

    def __init__(self, given: Any):
        self._tensors: list[torch.Tensor] = []
        self._filled: dict[int, tuple[Any, dict[int, Any]]] = {}  # with what was in each, by its id
        self._holds_objects = False
        waiting = [given]
        while waiting:
            each = waiting.pop()
            if isinstance(each, torch.Tensor):
                self._tensors.append(each)
            elif type(each) in _FILLED:
                if id(each) not in self._filled:
                    parts = [part for part in _items(each) if not isinstance(part, _PLAIN)]
                    self._filled[id(each)] = each, {id(part): part for part in parts}
                    waiting += parts
            elif not tree_is_leaf(each):
                waiting += _parts(each)
            else:
                self._holds_objects = self._holds_objects or bool(_attributes(each))

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
        """Map the tensors of a result. Arguments stay the same objects; what the model put into one
        of them is mapped in its place."""
        mapped = _Mapped(function)
        for tensor in self._tensors:
            mapped.leave(tensor)
        if not self._holds_objects:
            for filled, _ in self._filled.values():
                mapped.leave(filled)
        for filled, before in self._filled.values():
            for key in [*(filled if isinstance(filled, dict) else range(len(filled)))]:
                if id(filled[key]) not in before and not isinstance(filled[key], _PLAIN):
                    new = mapped.of(filled[key])
                    if new is not filled[key]:
                        filled[key] = new
        return mapped.of(result)


class _Mapped:
    """The mapping of one result.

    A class rather than nested functions: these would refer to each other, and keep every result,
    and the autograd graph behind it, until Python's garbage collector runs.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self._function = function
        # By its id what was mapped, kept alive, and to what.
        self._known: dict[int, tuple[Any, Any]] = {}

    def leave(self, value: Any) -> None:
        """Leave a value, and all that is in it, as it is."""
        self._put(value, value)

    def of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            new: Any = self._function(value)
        elif not any(self.of(tensor) is not tensor for tensor in tensors_in(value)):
            new = value
        elif tree_is_leaf(value) or type(value) in _FILLED:
            new = self._of_object(value)
        else:
            new = tree_map(self.of, value, is_leaf=lambda each: each is not value)
        return self._put(value, new)

    def _of_object(self, value: Any) -> Any:
        """Copy an object, note the copy, and then map its parts, which may refer to it. An object
        that cannot be copied stays."""
        try:
            new = self._put(value, copy.copy(value))
        except Exception:  # of the object's own making
            new = value
        if new is value:
            return value
        for name, part in _attributes(value).items():
            if name in getattr(new, "__dict__", ()):
                new.__dict__[name] = self.of(part)
            else:
                object.__setattr__(new, name, self.of(part))  # it may be frozen
        if isinstance(value, _FILLED):
            for key in value if isinstance(value, dict) else range(len(value)):
                new[key] = self.of(value[key])
        return new

    def _put(self, value: Any, new: Any) -> Any:
        # A tuple in a list that it holds was mapped when that was.
        return self._known.setdefault(id(value), (value, new))[1]


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in a model's result, each once."""
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
    """Return the direct parts of a container or an object."""
    if not tree_is_leaf(value) and type(value) not in _FILLED:
        return tree_leaves(value, is_leaf=lambda each: each is not value)
    items: Iterable[Any] = ()
    if isinstance(value, _FILLED):
        items = _items(value)
    return [*_attributes(value).values(), *items]


def _items(filled: Any) -> Iterable[Any]:
    return filled.values() if isinstance(filled, dict) else filled


def _attributes(value: Any) -> dict[str, Any]:
    if callable(value) or isinstance(value, ModuleType):
        return {}
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = (name for each in slots for name in ([each] if isinstance(each, str) else each))
    own = (name for name in names if name not in ("__dict__", "__weakref__"))
    in_slots = {name: getattr(value, name) for name in own if hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}
