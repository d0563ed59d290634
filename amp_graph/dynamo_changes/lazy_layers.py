"""The random numbers that a lazy layer begins with are drawn, and others come after them.

    nn.Sequential(nn.LazyLinear(64), nn.Dropout(0.1))

Dynamo makes the parameters of such a layer while it captures, and then puts the state of random
numbers back: the dropout would draw the numbers that the weights were made of.

Private names of PyTorch used here:

    torch._dynamo.variables.nn_module.initialize_lazy_module       makes the parameters
    torch._dynamo.convert_frame.trace_frame                        puts the state back, of one frame
    InstructionTranslatorBase.speculation_log, torch._dynamo.symbolic_convert.SpeculationLog
                                                   what it is given, and what all its attempts have
"""

from __future__ import annotations

from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.symbolic_convert import SpeculationLog
from torch._dynamo.variables import nn_module

from amp_graph.dynamo_changes.replaced import Change
from amp_graph.snapshots import RandomSnapshot, is_incomplete

DRAWN = "_amp_graph_drawn"  # the state after the last numbers, in what Dynamo keeps for a frame


def _initialize(method: Any, frame: Any, module: Any, args: Any, kwargs: Any) -> None:
    begins = is_incomplete(module)
    method(frame, module, args, kwargs)
    if begins:
        setattr(frame.speculation_log, DRAWN, RandomSnapshot())


def _capture(method: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    finally:
        for log in (given for given in args if isinstance(given, SpeculationLog)):
            if hasattr(log, DRAWN):
                getattr(log, DRAWN).restore()


CHANGES: tuple[Change, ...] = (
    (nn_module, "initialize_lazy_module", _initialize),
    (convert_frame, "trace_frame", _capture),
)
