"""Fake tensors: running operators on shapes and dtypes alone.

Private names of PyTorch used here:

    torch._dispatch.python.enable_python_dispatcher     rules for symbolic sizes that C++ lacks
    torch._subclasses.fake_tensor.unset_fake_temporarily
    torch.fx.experimental.sym_node.SymNode.guard_bool   what is known of a size, for C++ as well
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from amp_graph.graphs.aten import CAST, RECURRENT, has_any_inside, tensors_of
from amp_graph.patching import method_inside

UNKNOWN_SIZE = 8192  # elements assumed along sizes that depend on data


def fake_mode_of(module: fx.GraphModule) -> FakeTensorMode | None:
    """Return the fake mode that a graph's values belong to; None for a graph without tensors."""
    for value in _values(module):
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextlib.contextmanager
def any_sizes(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let a trace or a replay lose sizes that depend on data: they need not come out of the
    operator that made them. An operator that writes into a view slices it again, for autograd, and
    nobody sees the sizes of that."""
    sizes = None if mode is None else mode.shape_env
    with sizes.ignore_fresh_unbacked_symbols() if sizes else nullcontext(), none_empty():
        yield


@contextlib.contextmanager
def none_empty() -> Iterator[None]:
    """Take a size that depends on data for another than 0, if an operator asks that (attention, of
    its lengths) and it is not known. The operator asks again when it runs."""

    def guard_bool(asked: Callable[..., bool], answer: SymNode, file: str, line: int) -> bool:
        try:
            return asked(answer, file, line)
        except GuardOnDataDependentSymNode:
            if answer.expr.is_Equality and answer.expr.rhs == 0:
                return False
            raise

    with method_inside(SymNode, "guard_bool", guard_bool):
        yield


def _values(module: fx.GraphModule) -> Iterator[Any]:
    for node in module.graph.nodes:
        yield from tree_leaves(node.meta.get("example_value", node.meta.get("val")))


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size as a number; for a symbolic size, the one seen when captured."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN_SIZE


def largest_number(constant: torch.Tensor) -> list[float]:
    """Return the largest finite number in a tensor, as a list, which is empty if none is known."""
    if isinstance(constant, FakeTensor) or constant.is_meta:
        return []
    with unset_fake_temporarily():
        finite = constant[constant.isfinite()].abs()
        return [float(finite.max())] if finite.numel() else []


@contextlib.contextmanager
def replaying(module: fx.GraphModule) -> Iterator[None]:
    """Run under fake tensors, without autograd, and without autocast from outside."""
    device_types = {t.device.type for n in module.graph.nodes for t in tensors_of(n)}
    with contextlib.ExitStack() as stack:
        for device_type in device_types - {"meta"}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.no_grad())
        mode = fake_mode_of(module)
        stack.enter_context(mode or nullcontext())
        stack.enter_context(any_sizes(mode))
        if _has_symbols(list(_values(module))) or has_any_inside(module, RECURRENT):
            # In C++ torch 2.11 has operators that fix a symbolic size or refuse it (linear).
            stack.enter_context(enable_python_dispatcher())
        yield


class CannotReplay(Exception):
    """The operator does not take these operands."""


def replay(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run an operator on fake operands. If it has no rule for symbolic sizes, the dtypes are read
    at the sizes seen when captured, and given to the captured results. Raises CannotReplay."""
    operator: Callable[..., Any] = node.target  # type: ignore[assignment]
    try:
        return operator(*args, **kwargs)
    except Exception as error:
        if not _has_symbols((args, kwargs)):
            raise CannotReplay from error
    try:
        args, kwargs = tree_map(concrete, (args, kwargs))
        dtypes = [t.dtype for t in tree_leaves(operator(*args, **kwargs))]
    except Exception as error:
        raise CannotReplay from error
    captured, spec = tree_flatten(node.meta["val"])
    return tree_unflatten([CAST(v, dtype=d) for v, d in zip(captured, dtypes, strict=True)], spec)


def _has_symbols(tree: Any) -> bool:
    sizes = [s for v in tree_leaves(tree) if isinstance(v, torch.Tensor) for s in v.shape]
    return any(isinstance(s, torch.SymInt) for s in sizes)


def concrete(value: Any) -> Any:
    """Return a tensor or a size with the numbers seen when captured, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        sizes = [size_hint(s) for s in value.shape]
        return torch.empty(sizes, dtype=value.dtype, device=value.device)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def held_otherwise(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that is not plain: nested, or made of other tensors, as quantised
    ones are; else "". A part of a DTensor is as plain as the whole."""
    if tensor.is_nested:
        return "a nested tensor"
    is_of_others = hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "device_mesh")
    return f"held as {type(tensor).__name__}" if is_of_others else ""
