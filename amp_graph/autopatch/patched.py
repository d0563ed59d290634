"""Public methods that run otherwise while scripts are watched, where nobody offers a hook."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def method_patched(kind: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """In here a method is `around`, which is given what it was and then what the method is. What
    somebody else puts in its place meanwhile stays."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(kind, name, patched)
    try:
        yield
    finally:
        if getattr(kind, name) is patched:
            setattr(kind, name, original)
