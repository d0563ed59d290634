"""An integer that a model reads from outside of itself and its arguments, and that changes.

    STEP                        a global of the script, or of another module
    settings.step, STACK[-1].iteration, COUNTS["step"]       in what a global holds

Dynamo takes any of these for a constant, and captures each value apart. They are treated like
attributes of the model: constant as long as they stay, and symbolic from the first change on.

Private names of PyTorch used here:

    torch._dynamo.variables.builder.is_int_specialization_case(value, source)
                                                             whether it is a constant for good
    torch._dynamo.source.is_from_defaults
    source.guard_source.is_local()
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.source import is_from_defaults
from torch._dynamo.variables import builder

from amp_graph.dynamo_changes.replaced import Change


def _is_constant(function: Any, value: Any, source: Any) -> Any:
    if source.guard_source.is_local():
        return function(value, source)
    return is_from_defaults(source)


CHANGES: tuple[Change, ...] = ((builder, "is_int_specialization_case", _is_constant),)
