"""Weak references, and what they are to."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def alive(reference: Callable[[], T | None]) -> T:
    """Return the referent of a weak reference that is known to live."""
    found = reference()
    assert found is not None, "a call of what is gone"
    return found


def living(references: Iterable[Callable[[], T | None]]) -> list[T]:
    """Return the referents that still live.

    The references come from `keyrefs` and `valuerefs` of weak dictionaries, which return all at
    once; iterating over a `WeakSet` fails if another thread adds to it meanwhile.
    """
    return [found for reference in references if (found := reference()) is not None]


def are_still(references: Iterable[Callable[[], T | None]], objects: Iterable[T]) -> bool:
    """Whether weak references refer to these very objects, one to one. An object made in the place
    of a dead one is another."""
    return all(map(operator.is_, map(operator.call, references), objects))


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method as a function that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        return alive(reference)(*args, **kwargs)

    return call
