"""Replace what PyTorch or a script defines, for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def method_inside(kind: type | ModuleType, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a class, or a function of a module, within, by `around`, which is given
    the original and then the arguments. If somebody else replaces it meanwhile, theirs stays."""
    method, own = getattr(kind, name), kind.__dict__.get(name)

    @functools.wraps(method)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(kind, name, replaced)
    try:
        yield
    finally:
        if kind.__dict__.get(name) is replaced:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)
