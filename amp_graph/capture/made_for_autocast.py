"""Custom autograd functions that are made for autocast.

They take the low precision as it comes, and their backward passes know which one it was. So they
are decorated by `torch.amp.custom_fwd`, for the kind of device, or ask in their forward whether
autocast is on, or are PyTorch's. Where Dynamo leaves such a function to Python, Python runs all of
it: a graph of its forward would tell its backward, which is never captured, that all is float32.

Not documented by PyTorch, and used here; seen to work on 2.11 and 2.13 to 2.15: that what
`custom_fwd` returns is a closure with a `device_type`. Private:

    torch.autograd.function.BackwardCFunction, ._forward_cls    the `ctx` of a function, and which
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import CodeType
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from amp_graph.callers import first_argument

CUSTOM_FWD = torch.amp.custom_fwd.__code__.co_filename  # what it decorates has its code from there
ASKS = frozenset(
    {
        "is_autocast_enabled",
        "is_autocast_cpu_enabled",
        "get_autocast_dtype",
        "get_autocast_gpu_dtype",
        "get_autocast_cpu_dtype",
    }
)


def is_made_for_autocast(function: type[Function], kinds: Collection[str]) -> bool:
    """Whether a function is made for autocast on one of these kinds of device."""
    if function.__module__.startswith(("torch.", "amp_graph.")):
        return True
    forward: Any = inspect.unwrap(function.forward, stop=_is_decorated)
    if _is_decorated(forward):
        closure = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
        return closure["device_type"].cell_contents in kinds
    return _asks(getattr(forward, "__code__", None))


def is_forward_that_asks(frame: Any) -> bool:
    """Whether a frame is the forward of such a function, which asks whether autocast is on."""
    return _asks(frame.f_code) and isinstance(first_argument(frame), BackwardCFunction)


def _is_decorated(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_filename == CUSTOM_FWD


def _asks(code: CodeType | None) -> bool:
    return code is not None and not ASKS.isdisjoint(code.co_names)
