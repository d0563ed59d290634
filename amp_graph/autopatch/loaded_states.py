"""Loss scales in the states that a script's optimizers load.

PyTorch has hooks for the steps of all optimizers, but none for what they load, and drops what it
does not know in a state. So `Optimizer.load_state_dict` is patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from amp_graph.training.optimizers import before_load


@contextlib.contextmanager
def scales_are_loaded() -> Iterator[None]:
    """In here an optimizer that loads a state with loss scales goes on from them, though it is
    given to nobody."""
    original = Optimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        before_load(self, state_dict)
        original(self, state_dict)

    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        if Optimizer.load_state_dict is load_state_dict:
            Optimizer.load_state_dict = original  # type: ignore[method-assign]
