"""A captured graph under autocast by CUDA's rules, to set our plans beside.

Fake tensors claim to be on a CUDA device, so that this needs none.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.graphs.aten import CAST, bodies_of, tensors_of
from amp_graph.graphs.fake import size_hint

LOW = (torch.bfloat16, torch.float16)
Kept = set[tuple[int, torch.dtype]]
RECURRENT = frozenset(["aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"])
# What transformers spells, in a model that is not captured, as a linear layer for each expert.
EXPERTS = frozenset(["transformers::grouped_mm_fallback"])


@dataclass
class Casts:
    """Casts between float32 and a low precision: how many, and bytes by the operator that asked
    for them; `weights` and `weight_bytes` are those of parameters among them. `unreplayed` holds
    the operators whose result was taken from the capture."""

    count: int = 0
    by_op: Counter[str] = field(default_factory=Counter)
    weights: int = 0
    weight_bytes: int = 0
    unreplayed: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        return self.by_op.total()

    def __iadd__(self, other: Casts) -> Casts:
        self.count += other.count
        self.by_op += other.by_op
        self.weights += other.weights
        self.weight_bytes += other.weight_bytes
        self.unreplayed += other.unreplayed
        return self

    def add(
        self, op: str, source: torch.Tensor, result: torch.Tensor, is_weight: bool = False
    ) -> None:
        pair = {source.dtype, result.dtype}
        if torch.float32 in pair and not pair.isdisjoint(LOW):
            size = source.numel() * (source.element_size() + result.element_size())
            self.count += 1
            self.by_op[op] += size
            self.weights += is_weight
            self.weight_bytes += size * is_weight


def autocast_casts(captured: fx.GraphModule, dtype: torch.dtype) -> Casts:
    """The casts of one run of a captured graph under autocast to `dtype` on CUDA."""
    found = Casts()
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with torch.no_grad(), fake_mode, _cuda_autocast(dtype):
        _Replay(captured, dtype, found).replay()
    return found


@contextlib.contextmanager
def _cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast("cuda")`, which switches itself off where there is no such device."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


class _Replay(fx.Interpreter):
    """Runs a graph on fake CUDA tensors.

    Autocast keeps the casts of weights that require a gradient. A fake weight cannot require
    one without a CUDA build, so casts of one weight are counted once here.
    """

    def __init__(
        self, module: fx.GraphModule, dtype: torch.dtype, found: Casts, kept: Kept | None = None
    ):
        super().__init__(module)
        self.dtype, self.found = dtype, found
        self.kept = set() if kept is None else kept  # weights cast already
        self.weights: dict[int, torch.Tensor] = {}
        self.regions: list[tuple[bool, torch.dtype]] = []

    def replay(self, given: list[Any] | None = None) -> Any:
        values = iter(given or ())
        result = None
        for node in self.module.graph.nodes:
            if node.op == "placeholder" and given is not None:
                value = next(values)
            elif node.op == "output":
                result = self.map_nodes_to_values(node.args[0], node)
                continue
            else:
                value = self.value_of(node)
            self.env[node] = value
            if node.meta.get("is_parameter"):
                self.weights[id(value)] = value
        return result

    def value_of(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return as_cuda(node.meta.get("val"))
        if node.target in (_enter_autocast, _exit_autocast):
            return self.region(node)
        if isinstance(node.target, HigherOrderOperator):
            return self.higher_order(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        args, kwargs = tree_map(cuda_device, (args, kwargs))
        name = str(node.target)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in RECURRENT | EXPERTS:
            return self.cast_whole(node, args)
        with _Counting(self, name, _converts(node)) as counting:
            try:
                return node.target(*args, **kwargs)
            except RuntimeError:
                if node.target is operator.getitem:
                    raise
                self.found.unreplayed[name] += 1
        first = next((v for v in tree_leaves(args) if isinstance(v, torch.Tensor)), None)
        asked = kwargs.get("dtype") or (first.dtype if first is not None else torch.float32)
        dtype = counting.cast_to or asked
        return tree_map(lambda v: _in_dtype(v, dtype), as_cuda(node.meta.get("val")))

    def cast_whole(self, node: fx.Node, args: Any) -> Any:
        """Autocast casts input, state and all weights, with cuDNN, and the results stay low."""
        for value in tree_leaves(args):
            if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
                whole = value if value._base is None else value._base
                is_weight = id(whole) in self.weights
                self.found.add(str(node.target), value, CAST(value, dtype=self.dtype), is_weight)
        return tree_map(lambda v: _in_dtype(v, self.dtype), as_cuda(node.meta["val"]))

    def region(self, node: fx.Node) -> Any:
        """An autocast region of the model's own code."""
        if node.target is _enter_autocast:
            _, dtype, enabled, *_ = node.args
            self.regions.append(
                (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
            )
            before = dtype or self.regions[-1][1]
        else:
            enabled, before = self.regions.pop()
        torch.set_autocast_enabled("cuda", bool(enabled))
        torch.set_autocast_dtype("cuda", before)
        return None

    def higher_order(self, node: fx.Node) -> Any:
        """Replay the first body on the operands that are as many as it takes, else on its own
        captured inputs; the results have the dtypes that the body gives them."""
        results: Any = None
        for index, body in enumerate(bodies_of(self.module, node).values()):
            inner = _Replay(body, self.dtype, self.found, self.kept)
            inner.weights = self.weights
            wanted = [n for n in body.graph.nodes if n.op == "placeholder"]
            operands = [self.env[n] for n in node.all_input_nodes if n.op != "get_attr"]
            result = inner.replay(operands if len(operands) == len(wanted) else None)
            results = result if index == 0 else results
        captured = as_cuda(node.meta.get("val"))
        return _with_dtypes(captured, results)


class _Counting(TorchDispatchMode):
    def __init__(self, replay: _Replay, op: str, is_own_cast: bool):
        super().__init__()
        self.replay, self.op, self.is_own_cast = replay, op, is_own_cast
        self.cast_to: torch.dtype | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is CAST and not self.is_own_cast:
            self.cast_to = result.dtype
            source, kept = args[0], (id(args[0]), result.dtype)
            if id(source) not in self.replay.weights:
                self.replay.found.add(self.op, source, result)
            elif kept not in self.replay.kept:
                self.replay.kept.add(kept)
                self.replay.found.add(self.op, source, result, is_weight=True)
        return result


def _converts(node: fx.Node) -> bool:
    """Whether the model itself converts between dtypes here, with or without autocast."""
    before = [t.dtype for n in node.all_input_nodes for t in tensors_of(n)][:1]
    is_conversion = str(node.target).startswith(("aten.to.", "aten._to_copy.", "aten.type_as."))
    return is_conversion and before != [t.dtype for t in tensors_of(node)]


def as_cuda(value: Any) -> Any:
    """Tensors as fake ones on a CUDA device, symbolic sizes as numbers."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return size_hint(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes, strides = ([size_hint(s) for s in x] for x in (leaf.shape, leaf.stride()))
        return torch.empty_strided(sizes, strides, dtype=leaf.dtype, device="cuda")

    return tree_map(move, value)


def cuda_device(value: Any) -> Any:
    """A device argument: CUDA in place of the CPU."""
    is_cpu = isinstance(value, torch.device) and value.type == "cpu"
    return torch.device("cuda") if is_cpu else value


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A captured float32 result as it is under autocast."""
    is_float32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    return value.to(dtype) if is_float32 and dtype in LOW else value


def _with_dtypes(captured: Any, results: Any) -> Any:
    ours, theirs = tree_leaves(captured), tree_leaves(results)
    if len(ours) != len(theirs):
        return captured
    dtypes = iter([getattr(t, "dtype", None) for t in theirs])
    return tree_map(lambda v: v.to(d) if (d := next(dtypes)) else v, captured)
