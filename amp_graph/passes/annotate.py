"""Annotate: read off a captured graph what the deciding stages need, as plain data.

    mm   = aten.mm.default(x, w)    ->  mm:   allow, reads (x, w), float32 (4, 4)
    view = aten.view.default(mm)    ->  view: clear, reads (mm,), memory mm
    relu = aten.relu_.default(view) ->  relu: clear, reads (view,), memory mm, written

The graph is only read. Facts come from the fake tensors in `meta["val"]` and from operator
schemas; nothing is predicted.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Container, Iterator, Set
from dataclasses import fields
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import free_symbols

from amp_graph.capture.autocast_regions import in_regions
from amp_graph.dtypes import INTEGERS, dtype_name
from amp_graph.graphs.aten import (
    DATA,
    SET_DATA,
    arguments,
    device_of,
    dtype_position,
    get_attribute,
    is_operator,
    op_name,
    operands_named,
    storages,
    tensors_of,
    written_operands,
)
from amp_graph.graphs.fake import largest_number, size_hint
from amp_graph.graphs.grad_modes import differentiated
from amp_graph.graphs.kernel_sums import added_up
from amp_graph.graphs.lines import called_at, place_of
from amp_graph.graphs.products import terms_of
from amp_graph.ir import Color, NodeFacts, TensorFacts
from amp_graph.listing import FLAGS, Listing
from amp_graph.oplists import OpLists
from amp_graph.reasons import OWN_AUTOCAST

NUMBERS = frozenset({"number", "Tensor", "Optional[number]"})
FLOATS = frozenset({"float", "Optional[float]"})
TRAITS = tuple(f.name for f in fields(NodeFacts) if f.name in FLAGS)  # those of the list entry
CONVERSION_OPS = frozenset({"aten::to", "aten::_to_copy", "aten::type_as"})


def annotate(module: fx.GraphModule, lists: OpLists, dtype: torch.dtype) -> dict[str, NodeFacts]:
    """Return the facts of every node, in graph order. `module` must be an ATen graph; `dtype` is
    the low precision that its operators may run in."""
    memory = _Memory(module)
    facts: dict[str, NodeFacts] = {}
    inside, recorded = in_regions(module), differentiated(module.graph)
    sizes = _sizes(module.graph)
    for node in module.graph.nodes:
        region = OWN_AUTOCAST if node in inside else ""
        facts[node.name] = _facts(node, lists, dtype, memory, sizes, region, node in recorded)
    return facts


def _facts(
    node: fx.Node,
    lists: OpLists,
    dtype: torch.dtype,
    memory: _Memory,
    sizes: Set[Any],
    region: str,
    is_recorded: bool,
) -> NodeFacts:
    listing = lists.lookup(node.target) if is_operator(node) else None
    origin = memory.origin(node)
    source, code = _source(node)
    traits = {trait: getattr(listing, trait, False) for trait in TRAITS}
    traits["widens"] = traits["widens"] and dtype_position(node) is not None
    return NodeFacts(
        name=node.name,
        op=sys.intern(op_name(node)),
        color=_color(node, listing),
        group=listing.group if listing else "",
        storage=listing.storage_on(device_of(node), dtype) if listing else None,
        reads=tuple(dict.fromkeys(n.name for n in _reads(node, listing))),
        positions=tuple(n.name for n in _positions(node, listing)),
        like=_like(node) if listing and listing.exact else "",
        operands=tuple(n.name for n in node.all_input_nodes),
        tensors=tuple(tensor_facts(t) for t in tensors_of(node)),
        memory=origin.name,
        written=memory.is_written(node),
        writes=memory.written_by(node),
        external=origin.op in ("placeholder", "get_attr"),
        is_parameter=bool(node.meta.get("is_parameter")),
        is_buffer=bool(node.meta.get("is_buffer")),
        user_cast=_is_user_cast(node),
        asked=_asks_for_float32(node),
        recorded=is_recorded,
        scalars=tuple(_scalars(node, listing)),
        unknown=tuple(_unknown(node, sizes)),
        terms=terms_of(node),
        strides=_strides(node),
        sums=added_up(node),
        fixed=region or _fixed(node),
        called=node.meta.get("called", ""),
        module_path=node.meta.get("module_path", ""),
        source=sys.intern(source),
        code=sys.intern(code),
        **traits,
    )


def _color(node: fx.Node, listing: Listing | None) -> Color | None:
    """Return the colour of the lists. A clear operator that turns float32 into integers or booleans
    is INFER, as it does more than move numbers: an id of 513 in a column of floats is 512 in
    bfloat16."""
    if node.target in (operator.getitem, DATA):
        return Color.CLEAR
    color = listing.color if listing else None
    if color is Color.CLEAR and any(map(_has_float32, node.all_input_nodes)):
        makes = {t.dtype for t in tensors_of(node)}
        if makes and not any(dtype.is_floating_point for dtype in makes):
            return Color.INFER
    return color


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    shape = tuple(int(s) if isinstance(s, int) else str(s) for s in tensor.shape)
    numel = 1
    for size in tensor.shape:
        numel *= size_hint(size)
    return TensorFacts(tensor.dtype, shape, tensor.device.type, numel)


def _reads(node: fx.Node, listing: Listing | None) -> Iterator[fx.Node]:
    operands = node.all_input_nodes
    if listing is not None and (listing.low_args or listing.metadata_args):
        device = device_of(node)
        operands = operands_named(node, lambda name: listing.computes_on(name, device))
    return filter(_has_float32, operands)


def _positions(node: fx.Node, listing: Listing | None) -> Iterator[fx.Node]:
    if _is_conversion(node) and all(t.dtype in INTEGERS for t in tensors_of(node)):
        return _reads(node, listing)
    names = listing.position_args if listing is not None else ()
    return filter(_has_float32, operands_named(node, names.__contains__) if names else ())


def _like(node: fx.Node) -> str:
    given = arguments(node)
    source = given.get("self")
    return source.name if isinstance(source, fx.Node) and given.get("dtype") is None else ""


def _has_float32(node: fx.Node) -> bool:
    return any(t.dtype is torch.float32 for t in tensors_of(node))


def _is_conversion(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.name in CONVERSION_OPS


def _is_user_cast(node: fx.Node) -> bool:
    """Whether a node is the user's conversion from float32 to float32: "stay precise from here on".

    A conversion right behind an operator that was asked for float32 is none, as it only goes back
    to whatever the model runs in: `softmax(scores, -1, dtype=torch.float32).to(query.dtype)`.
    """
    if not _is_conversion(node) or not _asks_for_float32(node):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or not _has_float32(source):
        return False
    return _is_conversion(source) or not _asks_for_float32(source)


def _asks_for_float32(node: fx.Node) -> bool:
    return is_operator(node) and arguments(node).get("dtype") is torch.float32


def _scalars(node: fx.Node, listing: Listing | None) -> Iterator[float]:
    """Yield the Python numbers that take part in the arithmetic: no sizes, dimensions or flags, nor
    the epsilon of a kernel that computes in float32 inside. Of a constant tensor, yield the largest
    number."""
    module = node.graph.owning_module
    if node.op == "get_attr" and module is not None:
        value = get_attribute(module, str(node.target))
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            yield from largest_number(value)
    kinds = NUMBERS if listing is not None and listing.storage else NUMBERS | FLOATS
    yield from (float(v) for v in _given_for(kinds, node) if isinstance(v, (int, float)))


def _unknown(node: fx.Node, sizes: Set[Any]) -> Iterator[str]:
    """Yield the names of the nodes whose numbers the arithmetic takes and only a call knows. Sizes
    of tensors, which are seldom beyond a range, and probabilities and the like are left out."""
    for value in _given_for(NUMBERS, node):
        number = value.meta.get("val") if isinstance(value, fx.Node) else None
        is_integer = isinstance(number, torch.SymInt)
        if isinstance(number, torch.SymFloat) or (is_integer and free_symbols(number) - sizes):
            is_read = value.target is torch.ops.aten.item.default
            yield value.all_input_nodes[0].name if is_read else value.name


def _sizes(graph: fx.Graph) -> set[Any]:
    """Return the symbols of which sizes of the graph's tensors are made."""
    tensors = (tensor for node in graph.nodes for tensor in tensors_of(node))
    symbolic = (size for t in tensors for size in t.shape if isinstance(size, torch.SymInt))
    return set().union(*map(free_symbols, symbolic))


def _strides(node: fx.Node) -> tuple[int, ...]:
    """Return the strides of a convolution, one for each dimension or for all; () for any other
    node."""
    if not isinstance(node.target, OpOverload) or "conv" not in node.target._schema.name:
        return ()
    strides = arguments(node).get("stride", 1)
    each = (strides,) if isinstance(strides, int) else strides
    return tuple(s for s in each if isinstance(s, int))


def _given_for(kinds: Container[str], node: fx.Node) -> Iterator[Any]:
    """Yield the arguments that an operator is given for parameters of these kinds."""
    if isinstance(node.target, OpOverload):
        values = arguments(node)
        for argument in node.target._schema.arguments:
            if argument.name in values and str(argument.type) in kinds:
                yield values[argument.name]


def _fixed(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return node.op
    if isinstance(node.target, HigherOrderOperator) and not is_operator(node):
        return "higher-order operator: its body is converted by itself"
    if node.target is SET_DATA:
        return "puts a tensor into other memory"
    produced = [t.dtype for t in tensors_of(node)]
    consumed = [t.dtype for n in node.all_input_nodes for t in tensors_of(n)]
    if torch.float32 not in produced + consumed:
        return "no float32 tensor"
    for dtype in produced + consumed:
        if (dtype.is_floating_point and dtype is not torch.float32) or dtype.is_complex:
            return f"{dtype_name(dtype)} operand or result"
    return ""


class _Memory:
    """An index of the graph's memory: which nodes share it, and which of it is written to."""

    def __init__(self, module: fx.GraphModule):
        self._first: dict[Any, fx.Node] = {}
        self._written: set[Any] = set()
        self._module = module
        for node in module.graph.nodes:
            keys = storages(node)
            if len(keys) == 1:  # of several results, each belongs to the node that takes it out
                self._first.setdefault(keys[0], node)
            for operand in written_operands(module, node):
                self._written.update(storages(operand))

    def origin(self, node: fx.Node) -> fx.Node:
        keys = storages(node)
        return self._first[keys[0]] if len(keys) == 1 else node

    def written_by(self, node: fx.Node) -> tuple[str, ...]:
        operands = written_operands(self._module, node)
        return tuple(dict.fromkeys(self.origin(operand).name for operand in operands))

    def is_written(self, node: fx.Node) -> bool:
        return any(key in self._written for key in storages(node))


def _source(node: fx.Node) -> tuple[str, str]:
    """Return where in the user's code a node came from, as "net.py:12 in forward", and that
    line."""
    frame = called_at(node)
    if frame is None:
        return "", ""
    return f"{place_of(frame)} in {frame.name}", (frame.line or "").strip()
