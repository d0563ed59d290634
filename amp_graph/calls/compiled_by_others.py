"""A converted model that somebody else's Dynamo comes to: questions to it, and warnings.

Private names of PyTorch used here; seen to work on 2.13, and there in 2.15:

    torch._dynamo.symbolic_convert.InstructionTranslator.current_tx, one_graph
                                                     whether what it captures is to be one graph
    torch._dynamo.utils._get_error_on_graph_break    whether a break is an error where it is
    nn.Module._wrapped_call_impl                     what calls a module
"""

from __future__ import annotations

import sys
from itertools import islice
from types import FrameType

import torch
from torch import nn
from torch._dynamo import utils
from torch._dynamo.symbolic_convert import InstructionTranslator

from amp_graph.callers import calling
from amp_graph.errors import warn
from amp_graph.modules import CALL, below_compile, is_compiled_around, unwrapped
from amp_graph.uncaptured import never_captured

LEFT = "what the script compiles is left as it is: the script uses torch.compile"
AROUND = "runs in mixed precision already; torch.compile around it does nothing"

DEPTH = 16  # frames between a model's stand-in and what was compiled around the model
CALLING = nn.Module._wrapped_call_impl.__code__


@torch.compiler.assume_constant_result
def is_left() -> bool:
    """Whether Dynamo, which asks while it captures, would raise if a graph ended here. Then a model
    that a script did not convert by itself is left as it is, and that is said."""
    is_one_graph = InstructionTranslator.current_tx().one_graph
    if is_one_graph or getattr(utils, "_get_error_on_graph_break", bool)():
        warn(LEFT)
        return True
    return False


@never_captured(reason="amp_graph takes note of what is compiled")
def tell_of_compile_around() -> None:
    """Say, once for a model, that what was compiled around it compiles nothing. It is called there,
    by code that was compiled or is left to Python."""
    model = compiled_around(sys._getframe())
    if model is not None:
        model.__dict__[CALL].tell_of_compile()


@torch.compiler.assume_constant_result
def come_to() -> None:
    """Warn of `torch.compile` around a converted model, where Dynamo has come to its call in a
    capture."""
    tell_of_compile_around()


def compiled_around(frame: FrameType | None) -> nn.Module | None:
    """The model with a stand-in before its call that is the innermost which Python calls from this
    frame on upwards, and was compiled as a whole, or in a wrapper of PyTorch's."""
    model = None
    for caller in islice(calling(frame), DEPTH):
        if caller.f_code is CALLING:
            called: nn.Module = caller.f_locals["self"]
            inner = unwrapped(below_compile(called))
            model = inner if model is None else model
            if inner is not model or CALL not in model.__dict__:
                return None
            if is_compiled_around(called):
                return model
    return None
