"""Values that were given and not read yet: from when one is read, the graph depends on it.

Private names of PyTorch used here:

    torch._dynamo.variables.LazyVariableTracker.is_realized, .peek_type, .source
    torch._dynamo.variables.TensorVariable                  a value of the graph
    torch._dynamo.guards.install_guard, GuardBuilder.TYPE_MATCH
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import LazyVariableTracker, TensorVariable

LISTS = (list, deque)


def class_of_unread(variable: Any) -> type[Any] | None:
    """Return the class of a value that nothing has read, without reading it; None of any other."""
    is_unread = isinstance(variable, LazyVariableTracker) and not variable.is_realized()
    return variable.peek_type() if is_unread else None


def is_unread_tensor(variable: Any) -> bool:
    """Whether it is a tensor that nothing has read."""
    kind = class_of_unread(variable)
    return kind is not None and issubclass(kind, Tensor)


def is_read_tensor(variable: Any) -> bool:
    """Whether it is a tensor of the graph. To ask for the class of an unread value reads it."""
    return class_of_unread(variable) is None and isinstance(variable, TensorVariable)


def class_of_list(variable: Any, kinds: tuple[type[Any], ...] = LISTS) -> type[Any] | None:
    """Return the class of a list, or another container of these kinds, that nothing has read. The
    graph depends on it from now on, in place of what is in it. None of any other value."""
    kind = class_of_unread(variable)
    if kind not in kinds or variable.source is None:
        return None
    install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))
    return kind
