"""Frames that Dynamo left to Python: why, for each code, and how to have it try them again.

Private names of PyTorch used here:

    torch._C._dynamo.eval_frame.set_code_exec_strategy, _FrameExecStrategy, _FrameAction
                                    to have it try again what it would let be for good
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from types import CodeType

from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from amp_graph.callers import is_ours, place
from amp_graph.capture.breaks import FLAT, MODEL, in_other_words
from amp_graph.capture.pieces import RESUMED

AS_EVER = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
_left: weakref.WeakKeyDictionary[CodeType, str] = weakref.WeakKeyDictionary()  # and why


def told(code: CodeType, reason: str) -> str:
    """Describe a frame that was left because of a break that Dynamo cannot go on after, in a loop,
    say: "net.py:12, in forward: why"."""
    name = RESUMED.sub(r"\1", code.co_name)
    is_call = is_ours(code.co_filename)
    where = MODEL if is_call else f"{place(code.co_filename, code.co_firstlineno)}, in {name}"
    return f"{where}: {in_other_words(reason)}"


def note(code: CodeType, reason: str) -> str:
    """Take note that frames of this code were left, and describe them. Of another model that has
    the same code, Dynamo does not say so again."""
    _left[code] = told(code, reason)
    return _left[code]


def left_in(model: nn.Module) -> list[str]:
    """Describe the frames of a model's modules that were left."""
    return [_left[code] for code in _codes(model)]


def try_again(codes: Iterable[CodeType]) -> None:
    """Have Dynamo capture code again that it would leave alone for good."""
    for code in codes:
        set_code_exec_strategy(code, AS_EVER)


def try_flat_again(model: nn.Module) -> None:
    """Have Dynamo capture code that it skips because FSDP held another model's parameters flat;
    this model's may not be."""
    flat = [code for code in _codes(model) if FLAT in _left[code]]
    for code in flat:
        del _left[code]
    try_again(flat)


def _codes(model: nn.Module) -> list[CodeType]:
    if not _left:  # as nearly always, and there may be many modules
        return []
    forwards = (inspect.getattr_static(type(m), "forward", None) for m in model.modules())
    codes = dict.fromkeys(getattr(forward, "__code__", None) for forward in forwards)
    return [code for code in codes if code is not None and code in _left]
