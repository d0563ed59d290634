"""The steps of optimizers among the frames of a call."""

from __future__ import annotations

from itertools import islice
from types import FrameType

from torch.optim import Optimizer

from amp_graph.callers import calling

# The code in which PyTorch calls steps and their hooks.
HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__


def steps_around(frame: FrameType | None, enough: int = 1) -> int:
    """Return how many steps there are, of whichever optimizers, counted up to `enough`."""
    steps = filter(_is_step, calling(frame))
    return sum(1 for _ in islice(steps, enough))


def _is_step(frame: FrameType) -> bool:
    code = frame.f_code
    # Dynamo changes both code and name.
    return code.co_filename == HOOKED_STEP.co_filename and HOOKED_STEP.co_name in code.co_name
