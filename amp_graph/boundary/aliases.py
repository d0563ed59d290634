"""Inputs and results that share their memory cross a boundary as autograd knows them.

Views of one tensor cross as views of whatever crosses for that tensor: results always, inputs where
the graph writes into one of them. A result that is a view of an input leaves as a view of that
input. So autograd knows of a write what it would have known without the boundary: the others
change, too. What shares memory in another way, or is given more than a view's gradient, crosses by
itself; such a result cannot be written to.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from amp_graph.boundary.crossing import (
    carries_gradient,
    enter_input,
    is_heard,
    leave,
    write_back,
)
from amp_graph.boundary.scale import Scale
from amp_graph.gradients.memory import memories, memory, view_of

VIEWS_OF_VIEWS = 64  # followed down to their base


def enter_inputs(
    scale: Scale, inputs: Sequence[Tensor], are_written: Sequence[bool]
) -> list[Tensor]:
    """Hand in inputs that carry gradients, which go out to them divided by S.

    are_written: which of them the graph writes to. Their values have a version of their own, so
        that recording the graph's writes does not count as another write after what it saved.
    """
    written = {memory(x) for x, is_written in zip(inputs, are_written, strict=True) if is_written}
    entered: dict[int, Tensor] = {}
    for sharing in _by_memory(inputs):
        is_written = memory(sharing[0]) in written
        base = _common_base(sharing) if is_written else None
        crossed = {
            id(x): enter_input(scale, x, x.data if is_written else x)
            for x in (sharing if base is None else [base])
        }
        entered |= crossed if base is None else _views(sharing, base, crossed[id(base)])
    return [entered[id(x)] for x in inputs]


def record_writes(scale: Scale, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Record what a graph wrote into these tensors through the values that had entered for them.
    For a view it follows from the write into its base."""
    known = {id(x) for x in inputs}
    for written, value in zip(inputs, values, strict=True):
        if written._base is None or id(written._base) not in known:
            write_back(scale, written, value)


def leave_results(
    scale: Scale,
    results: Sequence[Any],
    inputs: Sequence[Tensor],
    values: Sequence[Tensor],
    constants: Iterable[Tensor],
    have_left: Container[int],
) -> list[Any]:
    """Hand results out; their gradients come in times S. A tensor returned twice stays one.

    inputs: tensors that entered as `values`. A result that only views such a value leaves as that
        view of the input: the graph has nothing to do with it.
    constants: tensors that did not enter, as they required no gradient. What was written into one
        leaves in it, and so do results that are views of it.
    have_left: positions of the results that left before.
    """
    numbered = enumerate(results)
    carrying = [v for i, v in numbered if i not in have_left and carries_gradient(v)]
    if filled := [*filter(_is_filled, constants)]:
        record_writes(scale, filled, filled)
        of_filled = {*map(id, map(_base, filled))}
        carrying = [t for t in carrying if id(_base(t)) not in of_filled]
    if not carrying:
        return [*results]
    of_inputs = {*memories(values)}
    left: dict[int, Tensor] = {}
    for sharing in _by_memory(carrying):
        if memory(sharing[0]) in of_inputs:
            left |= _leave_inputs(scale, sharing, inputs, values)
            continue
        if len(sharing) == 1:
            left[id(sharing[0])] = leave(scale, sharing[0])
            continue
        base = None if any(map(is_heard, sharing)) else _common_base(sharing)
        if base is None:
            left |= {id(x): leave(scale, x, shares=True) for x in sharing}
        else:
            left |= _views(sharing, base, leave(scale, base))
    return [left.get(id(value), value) for value in results]


def _leave_inputs(
    scale: Scale, sharing: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Hand results out that share the memory of one that entered; by their ids."""
    # By the id of what has entered, what it entered for: an input, or the base of some.
    given: dict[int, Tensor] = {}
    for x, value in zip(inputs, values, strict=True):
        given[id(_base(value))] = x if value._base is None else _base(x)
    left: dict[int, Tensor] = {}
    for result in sharing:
        entered = _base(result)
        giver = given.get(id(entered))
        if giver is None or is_heard(result) or not _is_but_a_view(result, entered):
            left[id(result)] = leave(scale, result, shares=True)
        else:
            left |= _views([result], entered, giver)
    return left


def _by_memory(tensors: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
    if len(tensors) == 1:
        return [tensors]
    found: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        found.setdefault(memory(tensor), {})[id(tensor)] = tensor
    return [[*sharing.values()] for sharing in found.values()]


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _common_base(sharing: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that several tensors are views of, which may be one of them; None if there
    is no such tensor, or none that carries a gradient."""
    if len(sharing) == 1:
        return None
    bases = {id(b): b for b in map(_base, sharing)}
    base, *others = bases.values()
    if others or not base.requires_grad:
        return None
    return base if all(_is_but_a_view(x, base) for x in sharing) else None


def _is_filled(tensor: Tensor) -> bool:
    """Whether what was written into it carries a gradient."""
    return tensor.requires_grad and not tensor.is_leaf


def _is_but_a_view(tensor: Tensor, base: Tensor) -> bool:
    """Whether a tensor's gradient does nothing but go on to the base: it does not end here, and no
    function of the user's has made the view (one whose gradient is reversed, say)."""
    if tensor is base:
        return True
    if tensor.is_leaf:
        return False
    node: Any = tensor.grad_fn
    for _ in range(VIEWS_OF_VIEWS):
        if node is base.grad_fn or getattr(node, "variable", None) is base:
            return True
        if isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
            return False
        ((node, _),) = node.next_functions
    return False


def _views(of: Sequence[Tensor], base: Tensor, crossed: Tensor) -> dict[int, Tensor]:
    """Return, by their ids, the same views of the tensor that has crossed for their base."""
    return {id(x): crossed if x is base else view_of(crossed, x) for x in of}
