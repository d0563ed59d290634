"""Each thread has its own stack of the modes that a trace above autograd is under.

Private name of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._ops.mode_stack_state_for_pre_dispatch    those modes, of the process
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
