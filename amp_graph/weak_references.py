"""Weak references, and what they are to."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def alive(reference: Callable[[], T | None]) -> T:
    """What a weak reference is to, which is not gone while it is called."""
    found = reference()
    assert found is not None, "a call of what is gone"
    return found


def living(references: Iterable[Callable[[], T | None]]) -> list[T]:
    """What weak references are to that is not gone. `keyrefs` and `valuerefs` of weak dictionaries
    give these at once; going through a `WeakSet` fails if another thread adds to it meanwhile."""
    return [found for reference in references if (found := reference()) is not None]


def are_still(references: Iterable[Callable[[], T | None]], objects: Iterable[T]) -> bool:
    """Whether weak references are to these very objects, as many of them, none of which was made
    where another had been."""
    return all(map(operator.is_, map(operator.call, references), objects))


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        return alive(reference)(*args, **kwargs)

    return call
