"""A mask that transformers leaves out, the graph leaves out.

    if is_tracing(mask): return False           so it makes a mask even where it was given none,
    if not is_tracing(indices) and (indices[:, -1] == 0).all(): return None
                                                where positions may have gaps,
    if ... padding_mask.all(): return True      and where something may be padded

Attention has faster kernels without a mask, which also keep none for backward. While anyone traces
it, transformers looks at no values, and makes masks in case. Here a capture finds what the model
would find: that no mask is given, that positions which were counted up have no gaps, and that a
mask which is an input is full. This last holds for such masks alone: a guard looks at each, as the
model does, until one is not full; what is captured for that one is right for all.

On 2.11 Dynamo takes every capture for `torch.export`, for which masks are made as well.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.UserFunctionVariable.call_function, .fn      a function to capture
    torch._dynamo.variables.TensorVariable.as_proxy, .dtype, .ndim       a value of the graph
    torch._dynamo.variables.builder.GraphArg.source, .example   behind a placeholder's "grapharg"
    torch._dynamo.variables.torch.tracing_state_functions                what Dynamo says of itself

Of transformers, 5.17 and 5.23: the functions of `KNOWN`. Versions without them make masks as they
did.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserFunctionVariable
from torch._dynamo.variables.torch import tracing_state_functions

from amp_graph.dynamo_changes.own_guards import hold_while
from amp_graph.dynamo_changes.replaced import method_inside, with_entries

WRITES = (operator.setitem, operator.iadd, operator.isub, operator.imul)


@contextlib.contextmanager
def unneeded_masks_left_out() -> Iterator[None]:
    """Within, Dynamo captures no mask that transformers makes only because it is captured."""
    not_exporting = {torch.compiler.is_exporting: False}
    with (
        with_entries(tracing_state_functions(), not_exporting),
        method_inside(UserFunctionVariable, "call_function", _call),
    ):
        yield


def leaves_out_causal(
    mask: Tensor, queries: int, keys: int, q_offset: int, kv_offset: int, window: int | None = None
) -> bool:
    """Whether attention that is causal needs no mask beside `is_causal=True`."""
    return queries == keys and (window is None or keys < window) and is_full(mask)


def leaves_out_bidirectional(mask: Tensor, keys: int, window: int | None = None) -> bool:
    return (window is None or keys < window) and is_full(mask)


def is_full(mask: Tensor) -> bool:
    """Whether nothing is masked, as far as that may be known. The host waits for the answer."""
    if type(mask) is not Tensor or mask.is_meta:
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(mask.all())


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    find = KNOWN.get((function.fn.__module__, function.fn.__name__))
    found = find(frame, *args) if find is not None and args and not kwargs else None
    return method(function, frame, args, kwargs) if found is None else found


def _traces(frame: Any, value: Any) -> Any:
    value = value.realize()
    is_none = value.is_python_constant() and value.as_python_constant() is None
    return ConstantVariable.create(False) if is_none else None


def _packed(frame: Any, positions: Any) -> Any:
    positions = positions.realize()
    if isinstance(positions, TensorVariable) and positions.ndim == 2 and _counts_up(positions):
        return ConstantVariable.create(None)
    return None


def _ask(function: Any) -> Callable[..., Any]:
    """Ask this instead of the model's own function, of a mask that is given."""

    def found(frame: Any, mask: Any, *rest: Any) -> Any:
        if not isinstance(mask.realize(), TensorVariable):
            return None
        return UserFunctionVariable(function).call_function(frame, [mask, *rest], {})

    return found


def _is_full(frame: Any, mask: Any) -> Any:
    """Known of an input of the graph, also if it was cast."""
    node = mask.realize().as_proxy().node
    while node.target == "to" and not _is_written(node):
        node = node.args[0]
    given = node.meta.get("grapharg") if node.op == "placeholder" else None
    if given is None or _is_written(node) or not is_full(given.example):
        return ConstantVariable.create(False)
    hold_while(is_full, given.source, "no zeros in it")
    return ConstantVariable.create(True)


def _counts_up(value: Any) -> bool:
    """Whether along the last dimension each number is one more than the one before."""
    if value.dtype is not torch.int64:
        return False
    node = value.as_proxy().node
    while node.target is not torch.arange:
        if not _keeps_steps(node):
            return False
        node = node.args[0]
    return (
        len(node.args) <= 2 and not node.kwargs.keys() & {"step", "out"} and not _is_written(node)
    )


def _keeps_steps(node: fx.Node) -> bool:
    """Whether a result counts up if its first argument does."""
    match node.target, *node.args[1:]:
        case operator.add, other:
            value = other.meta.get("example_value") if isinstance(other, fx.Node) else other
            return not isinstance(value, Tensor) and isinstance(node.args[0], fx.Node)
        case "expand", *_, -1:
            return True
        case ("unsqueeze", 0) | (operator.getitem, None):
            return True
        case operator.getitem, (None, slice(start=None, stop=None, step=None)):
            return True
    return False


def _is_written(node: fx.Node) -> bool:
    """Whether anything was written so far into what it returns, or was made of it."""
    for user in node.users:
        name = user.target if isinstance(user.target, str) else ""
        if name.endswith("_") and not name.endswith("__"):
            return True
        if user.target in WRITES or "out" in user.kwargs or _is_written(user):
            return True
    return False


# What is found where a model calls these, by module and name, or None.
MASKS = "transformers.masking_utils"
KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers.utils.import_utils", "is_tracing"): _traces,
    (MASKS, "find_packed_sequence_indices"): _packed,
    (MASKS, "_ignore_causal_mask_sdpa"): _ask(leaves_out_causal),
    (MASKS, "_ignore_bidirectional_mask_sdpa"): _ask(leaves_out_bidirectional),
    (__name__, "is_full"): _is_full,
}
