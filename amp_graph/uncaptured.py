"""Functions of this package that Dynamo is never to capture.

Private names of PyTorch used here:

    torch._C._dynamo.eval_frame.get_eval_frame_callback     whether Dynamo is capturing
    torch._dynamo.eval_frame.skip_code                      has it leave a function alone
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code

capturing = get_eval_frame_callback  # what Dynamo does with what is called now, if anything
F = TypeVar("F", bound=Callable[..., Any])


def never_captured(reason: str) -> Callable[[F], F]:
    """Decorate a function as `torch.compiler.disable` does, but call it directly where Dynamo is
    not capturing: to put Dynamo's callback away and back takes microseconds of each call."""

    def decorated(function: F) -> F:
        disabled = torch.compiler.disable(function, reason=reason)

        @functools.wraps(disabled)  # by whose attributes Dynamo knows what not to inline
        def call(*args: Any, **kwargs: Any) -> Any:
            if capturing() is None:
                return function(*args, **kwargs)
            return disabled(*args, **kwargs)

        made: Any = call
        skip_code(made.__code__)
        return made  # type: ignore[no-any-return]

    return decorated


def passed_over(function: F) -> F:
    """Decorate a function that Dynamo is to leave alone, but not the functions it calls."""
    skip_code(function.__code__)
    return function


# Dynamo would capture these in a step of an optimizer that a user compiles, and capture them anew
# at each step, for what they count.
not_compiled = never_captured(reason="amp_graph follows what optimizers do")
around_compiled = torch.compiler.disable(  # what they call may be compiled
    recursive=False, reason="amp_graph follows what optimizers do"
)
