"""Methods that are patched while models of a script are converted, besides that of every call.

Nobody is told of a process when it starts by multiprocessing, so `BaseProcess.start`, which is
public, is patched. PyTorch has hooks for the steps of all optimizers, but none for what they load,
and drops what it does not know in a state. So `Optimizer.load_state_dict` is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Any

from torch.optim import Optimizer

from amp_graph.optimizers.guards import before_load
from amp_graph.patching import method_inside


def children_heard(hear: Callable[[], None]) -> AbstractContextManager[None]:
    """In here `hear` is called when a process has started that reports by itself: no daemon."""

    def start(original: Callable[[BaseProcess], None], process: BaseProcess) -> None:
        original(process)
        if not process.daemon:
            hear()

    return method_inside(BaseProcess, "start", start)


def scales_are_loaded() -> AbstractContextManager[None]:
    """In here an optimizer that loads a state with loss scales goes on from them, though it is
    given to nobody."""
    return method_inside(Optimizer, "load_state_dict", _load)


def _load(original: Callable[..., None], optimizer: Optimizer, state_dict: Any) -> None:
    before_load(optimizer, state_dict)
    original(optimizer, state_dict)
