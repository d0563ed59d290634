"""What a cached property computes is captured, on Python 3.11 too.

    @functools.cached_property
    def mask(self): return torch.ones(n, n).tril()

There such a property takes a lock around what it computes, and Dynamo leaves a frame in which a
lock is taken. Nobody else is captured meanwhile, and what was cached is guarded: no lock is needed,
and from 3.12 on Python takes none.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.14:

    torch._dynamo.variables.builder.VariableBuilder._type_dispatch, .source, .tx, .wrap_user_defined
    torch._dynamo.output_graph.OutputGraph.resolve_source_value, torch._dynamo.source.AttrSource
    torch._dynamo.variables.ctx_manager.NullContextVariable
"""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property
from typing import Any

from torch._dynamo.source import AttrSource
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import NullContextVariable

from amp_graph.dynamo_changes.replaced import with_entries

LOCK = type(threading.RLock())


def cached_properties_captured() -> contextlib.AbstractContextManager[None]:
    """Within, the locks of cached properties are not taken."""
    return with_entries(VariableBuilder._type_dispatch(), {LOCK: _wrap})


def _wrap(builder: Any, lock: Any) -> Any:
    source = builder.source
    if isinstance(source, AttrSource):
        owner = builder.tx.output.resolve_source_value(source.base)
        if isinstance(owner, cached_property):
            return NullContextVariable()
    return builder.wrap_user_defined(lock)
