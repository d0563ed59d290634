"""A thread that captures has its own stack of the modes that a trace above autograd is under.

PyTorch has one stack for the process, from which a thread takes the modes of others as well when it
lays off its own for a while.

Private name of PyTorch used here:

    torch._ops.mode_stack_state_for_pre_dispatch    that stack
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import _ops

from amp_graph.dynamo_changes.replaced import with_entries


@contextlib.contextmanager
def modes_above_autograd_apart() -> Iterator[None]:
    """Within, this thread has such a stack."""
    thread = threading.get_ident()
    others: Any = _ops.mode_stack_state_for_pre_dispatch
    own = type(others())()

    def of_thread() -> Any:
        return own if threading.get_ident() == thread else others()

    with with_entries(vars(_ops), {others.__name__: of_thread}):
        yield


CONTEXTS = (modes_above_autograd_apart,)
