"""Taking some of the values of a call, which is done at every call of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

Pick = Callable[[Sequence[Any]], Sequence[Any]]


def picker(positions: Sequence[int]) -> Pick:
    """Return a function that takes the items at these positions out of a sequence, in C."""
    if len(positions) > 1:
        return itemgetter(*positions)
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))
