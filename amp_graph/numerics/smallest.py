"""A small part of many that is enough: bisection, then delta debugging (Zeller and Hildebrandt,
Simplifying and Isolating Failure-Inducing Input, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Meets: TypeAlias = Callable[[Sequence[T]], bool]


def smallest(suspects: tuple[T, ...], meets: Meets[T]) -> tuple[T, ...]:
    """A part of `suspects` that meets the bound, and of which every node is needed."""
    if not meets(suspects):
        return suspects
    too_few, enough = 0, len(suspects)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if meets(suspects[:middle]) else (middle, enough)
    return _needed(suspects[:enough], meets)


def _needed(nodes: tuple[T, ...], meets: Meets[T]) -> tuple[T, ...]:
    """Leave out ever smaller parts for as long as the rest still meets the bound."""
    size = max(1, len(nodes) // 2)
    while True:
        start, before = 0, len(nodes)
        while start < len(nodes):
            rest = nodes[:start] + nodes[start + size :]
            if meets(rest):
                nodes = rest
            else:
                start += size
        if size == 1 and len(nodes) == before:
            return nodes
        size = max(1, size // 2)
