"""Written casts: the casts of a graph while it is emitted.

A cast belongs to its value. All readers share it until the value's memory is written. Autograd
records it wherever it is first needed, so that it requires a gradient exactly if the value does:

    h = linear(x)                      h          = linear(x)
    set_grad_enabled(False)            set_grad_enabled(False)
    s = sum(h)                         set_grad_enabled(True)
    set_grad_enabled(True)             h_float32  = _to_copy(h, dtype=float32)
    y = exp(h) / s                     set_grad_enabled(False)
                                       s          = sum(h_float32)
                                       set_grad_enabled(True)
                                       y          = exp(h_float32) / s

Autograd adds up the gradients of all readers of a low cast in low precision; autocast, which casts
for each reader, adds them in float32. So where it records, a low cast is made anew after 16
readers. Casts of one weight, which are lifted out of the graph, are one copy all the same.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from amp_graph.dtypes import dtype_name
from amp_graph.graphs.aten import ADD, CAST, CLAMP, SET_GRAD_ENABLED
from amp_graph.graphs.grad_modes import recorded_nodes
from amp_graph.ir import Cast, NodeFacts, Paint


class WrittenCasts:
    """`new` gives the emitted form of each captured node that was emitted so far."""

    def __init__(
        self,
        captured: fx.Graph,
        graph: fx.Graph,
        new: Mapping[fx.Node, fx.Node],
        facts: Mapping[str, NodeFacts],
        paints: Mapping[str, Paint],
        dtype: torch.dtype,
    ):
        self._graph, self._new, self._facts, self._paints = graph, new, facts, paints
        self._dtype = dtype
        self._names = set(facts)
        self._found: dict[str, dict[tuple[fx.Node, torch.dtype], fx.Node]] = defaultdict(dict)
        self._casts: dict[fx.Node, Cast] = {}
        self._records = torch.is_grad_enabled()
        self._records_some = bool(recorded_nodes(captured))

    @property
    def all(self) -> tuple[Cast, ...]:
        return tuple(self._casts.values())

    def follow(self, node: fx.Node) -> None:
        """Take note that a captured node was emitted."""
        if node.target is SET_GRAD_ENABLED:
            self._records = bool(node.args[0])

    def forget(self, memory: str) -> None:
        """Take note that the values in this memory were written: their casts are stale."""
        self._found.pop(memory, None)

    def remember(self, value: fx.Node, dtype: torch.dtype, as_node: fx.Node) -> None:
        self._found[self._facts[value.name].memory][value, dtype] = as_node

    def of(self, value: fx.Node, dtype: torch.dtype, reader: str) -> fx.Node:
        """Return the value in `dtype`: itself, a cast made before, or a new one."""
        if self._new[value].meta["val"].dtype is dtype:
            return self._new[value]
        found = self._found[self._facts[value.name].memory].get((value, dtype))
        if found is None or self._loses_gradients(found):
            with self._recorded():
                found = self._write(value, dtype)
            self.remember(value, dtype, found)
        cast = self._casts.get(found)
        if cast is not None and reader not in cast.readers:
            self._casts[found] = replace(cast, readers=(*cast.readers, reader))
        return found

    def _loses_gradients(self, found: fx.Node) -> bool:
        cast = self._casts.get(found)
        return self._records_some and cast is not None and cast.is_full

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        switch = self._records_some and not self._records
        if switch:
            self._call(SET_GRAD_ENABLED, (True,), {}, "record", {})
        yield
        if switch:
            self._call(SET_GRAD_ENABLED, (False,), {}, "no_record", {})

    def _write(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        new, facts = self._new[value], self._facts[value.name]
        before: torch.dtype = new.meta["val"].dtype
        saturate = self._paints[value.name].huge and dtype is self._dtype
        if saturate:
            new = self._clamped(new, dtype, value)
        suffix = dtype_name(dtype)
        cast = self._run(CAST, (new,), {"dtype": dtype}, f"{value.name}_{suffix}", value)
        size = sum(t.numel for t in facts.tensors) * (before.itemsize + dtype.itemsize)
        self._casts[cast] = Cast(value.name, dtype, (), size, saturate, facts.is_weight)
        return cast

    def _clamped(self, new: fx.Node, dtype: torch.dtype, value: fx.Node) -> fx.Node:
        """Clamp finite numbers, in float32, to the range of `dtype`, and leave infinities: a row of
        a mask may hold both -inf and -3.4e38, and an overflow has to stay visible. The part of a
        finite number that is added here is at most 4, less than rounding takes off the largest
        number of `dtype`."""
        info, part = torch.finfo(dtype), torch.finfo(torch.float32).tiny
        clamped = self._run(CLAMP, (new, info.min, info.max), {}, f"{value.name}_clamped", value)
        return self._run(ADD, (clamped, new), {"alpha": part}, f"{value.name}_or_infinite", value)

    def _run(
        self, target: Callable[..., Any], args: Any, kwargs: Any, name: str, of: fx.Node
    ) -> fx.Node:
        value = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return self._call(target, args, kwargs, name, {**of.meta, "val": value})

    def _call(
        self, target: Callable[..., Any], args: Any, kwargs: Any, name: str, meta: dict[str, Any]
    ) -> fx.Node:
        while name in self._names:  # a captured node of this name, met later, would be renamed
            name += "_"
        self._names.add(name)
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        node.meta = meta
        return node
