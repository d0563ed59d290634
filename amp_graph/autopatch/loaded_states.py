"""Loss scales in the states that a script's optimizers load.

PyTorch has hooks for the steps of all optimizers, but none for what they load, and drops what it
does not know in a state. So `Optimizer.load_state_dict` is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from amp_graph.dynamo_changes.replaced import method_inside
from amp_graph.training.optimizers import before_load


def scales_are_loaded() -> AbstractContextManager[None]:
    """In here an optimizer that loads a state with loss scales goes on from them, though it is
    given to nobody."""
    return method_inside(Optimizer, "load_state_dict", _load)


def _load(original: Callable[..., None], optimizer: Optimizer, state_dict: Any) -> None:
    before_load(optimizer, state_dict)
    original(optimizer, state_dict)
