"""Emit: write the rewritten graph, node by node, on fake tensors.

    mm      = mm(x, w)              x_low   = _to_copy(x, dtype=bfloat16)
    softmax = softmax(mm, -1)       w_low   = _to_copy(w, dtype=bfloat16)
                                    mm      = mm(x_low, w_low)
                                    mm_f32  = _to_copy(mm, dtype=float32)
                                    softmax = softmax(mm_f32, -1)

Result dtypes are read off the replay, never predicted, so a kernel with rules of its own cannot
surprise a reader. The captured graph is not touched. A node that turns out not to run in low
precision runs as captured.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.flow import is_beyond, saturated, takes_either, widened_for_others
from amp_graph.graphs.aten import (
    CAST,
    DATA,
    arguments,
    dtype_position,
    get_attribute,
    is_operator,
    operands_named,
    set_attribute,
    tensors_of,
    written_operands,
)
from amp_graph.graphs.fake import CannotReplay, replay, replaying
from amp_graph.ir import Cast, Color, NodeFacts, Paint
from amp_graph.oplists import OpLists
from amp_graph.passes.written_casts import WrittenCasts


@dataclass(frozen=True)
class Emitted:
    """A rewritten graph and the casts in it. `refused`: nodes that were to be low and whose kernels
    refused; the graph has them in float32."""

    module: fx.GraphModule
    casts: tuple[Cast, ...]
    refused: frozenset[str]


def emit(
    module: fx.GraphModule,
    facts: Mapping[str, NodeFacts],
    paints: Mapping[str, Paint],
    low: frozenset[str],
    dtype: torch.dtype,
    lists: OpLists,
    bodies: Mapping[str, fx.GraphModule],
) -> Emitted:
    """Return the rewritten graph. `bodies` replaces the graphs of higher-order operators."""
    emitter = _Emitter(module, facts, paints, low, dtype, lists)
    with replaying(module):
        for node in module.graph.nodes:
            emitter.emit(node)
    root = torch.nn.Module()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            target = str(node.target)
            set_attribute(root, target, bodies.get(target, get_attribute(module, target)))
    emitted = fx.GraphModule(root, emitter.graph, class_name="AmpGraph")
    emitted.meta.update(module.meta)
    return Emitted(emitted, emitter.casts.all, frozenset(emitter.refused))


class _Emitter:
    """`new[node]` is the emitted form of a captured node."""

    def __init__(
        self,
        module: fx.GraphModule,
        facts: Mapping[str, NodeFacts],
        paints: Mapping[str, Paint],
        low: frozenset[str],
        dtype: torch.dtype,
        lists: OpLists,
    ):
        self.module, self.facts, self.paints = module, facts, paints
        self.low, self.dtype, self.lists = low, dtype, lists
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.casts = WrittenCasts(module.graph, self.graph, self.new, facts, paints, dtype)
        self.refused: set[str] = set()
        self.moved: set[str] = set()  # memories that are other fake ones than when captured
        self.widened = widened_for_others(facts, paints, low)
        self.float32_memory = {
            memory for f in facts.values() if f.name not in low for memory in f.writes
        } | {f.memory for f in facts.values() if paints[f.name].shares}

    def emit(self, node: fx.Node) -> None:
        try:
            self.write(node, self.dtype if node.name in self.low else torch.float32)
        except CannotReplay:
            if node.name not in self.low:
                raise
            self.refused.add(node.name)
            self.write(node, torch.float32)
        self.casts.follow(node)
        for operand in written_operands(self.module, node):
            self.casts.forget(self.facts[operand.name].memory)
        if self.needs_float32_memory(node):
            low = self.new[node]
            self.new[node] = self.casts.of(node, torch.float32, node.name)
            self.casts.remember(node, self.dtype, low)

    def write(self, node: fx.Node, precision: torch.dtype) -> None:
        """Write one node that gets its float32 operands in `precision`."""
        if not is_operator(node):
            whole = {*node.all_input_nodes} if node.target is operator.getitem else set()
            args, kwargs = self.emitted_operands(node, precision, whole)
            self.append(node, args, kwargs, _value_of(node, args))
            return
        metadata = self.metadata_operands(node)
        is_low = precision is not torch.float32
        reads = self.facts[node.name].reads
        either = {
            a
            for a in node.all_input_nodes
            if (is_low or a.name not in self.widened)
            and takes_either(self.facts, self.paints, a.name, node.name, reads, is_low)
        }
        if precision is torch.float32 and not self.must_be_replayed(node, metadata | either):
            args, kwargs = self.emitted_operands(node, precision, metadata)
            self.append(node, args, kwargs, node.meta.get("val"))
            return
        for as_they_are in (metadata | either, metadata, set()):
            with contextlib.suppress(CannotReplay):
                self.replay_and_append(node, precision, as_they_are)
                return
        raise CannotReplay

    def operands(
        self,
        node: fx.Node,
        precision: torch.dtype,
        as_they_are: set[fx.Node],
        give: Callable[[fx.Node, torch.dtype | None], Any],
    ) -> tuple[Any, Any]:
        """Return the node's arguments: those it computes on in `precision`, the rest as captured,
        each as `give(captured node, dtype)` returns it. A dtype of None stands for the one that it
        is emitted in."""
        computed_on = frozenset(self.facts[node.name].reads)

        def operand(arg: fx.Node) -> Any:
            value = arg.meta.get("val")
            if arg in as_they_are or not isinstance(value, torch.Tensor):
                return give(arg, None)
            lowered = value.dtype is torch.float32 and arg.name in computed_on
            return give(arg, precision if lowered else value.dtype)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        is_low = precision is not torch.float32
        if is_low and any(is_beyond(x, precision) for x in self.facts[node.name].scalars):
            args, kwargs = tree_map(lambda x: saturated(x, precision), (args, kwargs))
        return self.ask_for(precision, node, args, kwargs)

    def replay_and_append(
        self, node: fx.Node, precision: torch.dtype, as_they_are: set[fx.Node]
    ) -> None:
        """Run the operator on fake operands, to read what it returns, and append it to the
        graph."""
        args, kwargs = self.operands(node, precision, as_they_are, self.fake)
        value = replay(node, args, kwargs)
        results = [v.dtype for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
        captured = [t.dtype for t in tensors_of(node)]
        if precision is torch.float32:
            refused = results != captured
        else:
            refused = results == [torch.float32] and self.paints[node.name].color is not Color.ALLOW
        if refused:
            raise CannotReplay
        self.append(node, *self.emitted_operands(node, precision, as_they_are), value)

    def emitted_operands(
        self, node: fx.Node, precision: torch.dtype, as_they_are: set[fx.Node]
    ) -> tuple[Any, Any]:
        """Return the arguments as emitted nodes, and write the casts that are missing."""

        def give(arg: fx.Node, dtype: torch.dtype | None) -> fx.Node:
            return self.new[arg] if dtype is None else self.casts.of(arg, dtype, node.name)

        return self.operands(node, precision, as_they_are, give)

    def fake(self, arg: fx.Node, dtype: torch.dtype | None) -> Any:
        value = self.new[arg].meta.get("val")
        if dtype is None or not isinstance(value, torch.Tensor) or value.dtype is dtype:
            return value
        return CAST(value, dtype=dtype)

    def ask_for(
        self, precision: torch.dtype, node: fx.Node, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Set `dtype=` where the captured call asked for float32, or where the result would take
        the dtype of an operand that is read for its metadata alone."""
        position = dtype_position(node)
        if position is None or torch.float32 not in [t.dtype for t in tensors_of(node)]:
            return args, kwargs
        asked = arguments(node).get("dtype")
        gets_low = any(_differs(self.new[a], a) for a in node.all_input_nodes)
        widens = self.facts[node.name].widens and gets_low
        follows_operand = node.all_input_nodes and not self.metadata_operands(node) and not widens
        if asked is not torch.float32 and (asked is not None or follows_operand):
            return args, kwargs
        if position < len(args):
            return (*args[:position], precision, *args[position + 1 :]), kwargs
        return args, {**kwargs, "dtype": precision}

    def append(self, node: fx.Node, args: Any, kwargs: Any, value: Any) -> None:
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = {**node.meta, "val": value}
        self.new[node] = new
        if value is not node.meta.get("val"):
            self.moved.add(self.facts[node.name].memory)

    def needs_float32_memory(self, node: fx.Node) -> bool:
        """Whether the low result of a node is written to in float32, or shares its memory with an
        output."""
        if node.name not in self.float32_memory or self.facts[node.name].is_view:
            return False
        return _differs(self.new[node], node)

    def must_be_replayed(self, node: fx.Node, as_they_are: set[fx.Node]) -> bool:
        """Whether a float32 node may return something else than when captured, because of the dtype
        of an operand that it gets as it is, or because it is a view of memory that moved."""
        results = [self.facts[node.name]]  # of several, some may be views
        results += [f for user in node.users if (f := self.facts[user.name]).op == "getitem"]
        moved = any(f.is_view and f.memory in self.moved for f in results)
        return moved or any(_differs(self.new[a], a) for a in as_they_are)

    def metadata_operands(self, node: fx.Node) -> set[fx.Node]:
        """Return the operands whose shape and dtype alone the operator reads."""
        listing = self.lists.lookup(node.target)
        metadata_args = listing.metadata_args if listing else ()
        return set(operands_named(node, metadata_args.__contains__)) if metadata_args else set()


def _value_of(node: fx.Node, args: Any) -> Any:
    """Return the value of a node that is no operator, given its operands as emitted."""
    if node.target is operator.getitem:
        return args[0].meta["val"][args[1]]
    return DATA(args[0].meta["val"]) if node.target is DATA else node.meta.get("val")


def _differs(new: fx.Node, old: fx.Node) -> bool:
    ours, theirs = new.meta.get("val"), old.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return ours.dtype is not theirs.dtype
