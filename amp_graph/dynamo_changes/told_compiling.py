"""A model that asks whether it is compiled is told so, and that it was is noted.

    if not torch.compiler.is_compiling():
        positions.requires_grad_()

Some models leave out a step that way, and rely on whoever compiles them to take it before. Nobody
does here, so the code behind that step may raise where the model's own would not. The stand-ins
of converted parts ask, too, which is no matter of the model's.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase.f_code
    torch._dynamo.external_utils.is_compiling, torch._utils.is_compiling    deprecated
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._dynamo import external_utils

from amp_graph.callers import is_ours
from amp_graph.dynamo_changes.replaced import those_of


class _Told(threading.local):
    """Whether code that this thread captures was told so."""

    is_told = False


_told = _Told()


def take_told() -> bool:
    """Whether code was told so in this thread since this was last asked."""
    is_told, _told.is_told = _told.is_told, False
    return is_told


def _tell(method: Any, function: Any, frame: Any, *called: Any) -> Any:
    _told.is_told |= not is_ours(frame.f_code.co_filename)
    return method(function, frame, *called)


ASKS = [
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    *those_of(torch._utils, ["is_compiling"]),
    *those_of(external_utils, ["is_compiling"]),
]
CALLS = dict.fromkeys(ASKS, _tell)
