"""Why a frame is captured anew is told of what was captured of the same model.

    0/0: BACKEND_MATCH failure: ...         another model of the class
    0/1: tensor 'x' size mismatch ...       another one, of other sizes
    0/2: len(self.seen) == 2                what changed in this one

Dynamo tells the first reason that it finds, though what it had captured of the same code for
another callback could not be of use anyhow.

Private names of PyTorch used here; where they are otherwise, as before 2.13, all reasons count:

    torch._dynamo.convert_frame.get_and_maybe_log_recompilation_reasons
    CacheEntry.backend                                          the callback
"""

from __future__ import annotations

from typing import Any

from torch._dynamo import convert_frame

from amp_graph.dynamo_changes.replaced import Change, existing

REASONS = "get_and_maybe_log_recompilation_reasons"
OF_OTHERS = "BACKEND_MATCH"  # so begins a reason of another callback


def _of_own(
    find: Any, entries: Any, frame: Any, backend: Any, *rest: Any, **more: Any
) -> list[str]:
    if not isinstance(entries, list):
        return find(entries, frame, backend, *rest, **more)  # type: ignore[no-any-return]
    own = [e for e in entries if getattr(e, "backend", backend) == backend]
    return find(own, frame, backend, *rest, **more) if own else []


CHANGES: tuple[Change, ...] = existing((convert_frame, REASONS, _of_own))
