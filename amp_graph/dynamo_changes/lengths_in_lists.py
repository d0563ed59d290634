"""End the graph at a tensor in a list whose size varies, is 0 or 1 now, and not so for all of them.

    targets = [{"boxes": of 4 rows}, {"boxes": of 1 row}, {"boxes": of none}]      as of detectors
    torch.cat([target["boxes"] for target in targets])

A size that varies is a symbol in a graph, but not if it is 0 or 1: these Dynamo captures by
themselves. Of a list that is one graph for each choice of the items that are so, of a batch of
eight images 256 and more, each with all of the model in front of what reads the list. Python reads
such a list, and what is captured in front of it serves all.

Items of one size, such as the keys of all layers, are left to Dynamo: they make two graphs. So are
tensors in a tuple, which are rather different things, such as keys and what they are asked for, and
a list that a model reads before any parameter: nothing stands in front of it, and all behind it
would be left to autocast for one item of length 1.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.builder._automatic_dynamic     whether sizes of an input are symbols
    StatefulSymbolicContext.dynamic_sizes, DimDynamic      its answer
    torch._guards.ChainedSource.base, torch._dynamo.source.GetItemSource.index
                                                           where in the arguments a value is
    LocalSource.local_name, InstructionTranslator.output.root_tx.f_code
                                                           what the first arguments are called
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._dynamo.source import GetItemSource, LocalSource
from torch._dynamo.variables import builder
from torch._guards import ChainedSource
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.nn import Parameter

from amp_graph.callers import is_ours
from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.known_calls import given_to
from amp_graph.dynamo_changes.own_guards import value_of
from amp_graph.dynamo_changes.replaced import Change

ENDED = "a list of tensors of which some have a size of 0 or 1"
APART = (0, 1)  # sizes that Dynamo captures by themselves


def _sizes(method: Any, tensor: Tensor, frame: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    found = method(tensor, frame, source, *args, **kwargs)
    dims = enumerate(getattr(found, "dynamic_sizes", ()))
    varying = [dim for dim, kind in dims if kind is not DimDynamic.STATIC]
    apart = [dim for dim in varying if tensor.shape[dim] in APART]
    if apart and _is_behind_work(frame):
        if any(_differ(_others(source, frame), tensor, dim) for dim in apart):
            end_graph(ENDED, source.name)
    return found


def _is_behind_work(frame: Any) -> bool:
    """Whether a parameter was read by the model, or a graph of the call has ended before."""
    output = frame.output
    if not is_ours(output.root_tx.f_code.co_filename):  # it begins with another piece of its code
        return True
    given = map(given_to, output.graph.nodes)
    return any(isinstance(getattr(arg, "example", None), Parameter) for arg in given)


def _differ(others: Iterator[Any], tensor: Tensor, dim: int) -> bool:
    """Whether another tensor of this kind has another size there."""
    return any(
        isinstance(other, Tensor)
        and other.dtype == tensor.dtype
        and other.dim() == tensor.dim()
        and other.shape[dim] != tensor.shape[dim]
        for other in others
    )


def _others(source: Any, frame: Any) -> Iterator[Any]:
    """Yield what is in place of the value of a source in the other items of lists that it is in."""
    for part in _parts(source):
        if not isinstance(part, GetItemSource) or _is_call(part, frame):
            continue
        items = _value(part.base, frame)
        kinds = (list,) if part is source else (list, tuple)
        for index in range(len(items)) if isinstance(items, kinds) else ():
            if index != part.index:
                other = dataclasses.replace(part, index=index)
                yield _value(_with_part(source, part, other), frame)


def _parts(source: Any) -> Iterator[Any]:
    while isinstance(source, ChainedSource):
        yield source
        source = source.base


def _is_call(part: Any, frame: Any) -> bool:
    """Whether it is an item of `*args`, which is no list of the same things."""
    code = frame.output.root_tx.f_code
    if not code.co_flags & inspect.CO_VARARGS or not isinstance(part.base, LocalSource):
        return False
    return bool(part.base.local_name == code.co_varnames[code.co_argcount + code.co_kwonlyargcount])


def _with_part(source: Any, part: Any, other: Any) -> Any:
    if source is part:
        return other
    return dataclasses.replace(source, base=_with_part(source.base, part, other))


def _value(source: Any, frame: Any) -> Any:
    """Return the value of a source, or None if there is none."""
    try:
        return value_of(source, frame)
    except (LookupError, AttributeError, TypeError, NotImplementedError):
        return None


CHANGES: tuple[Change, ...] = ((builder, "_automatic_dynamic", _sizes),)
