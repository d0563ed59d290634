"""The steps of optimizers among the frames of a call."""

from __future__ import annotations

from types import FrameType

from torch.optim import Optimizer

# What PyTorch calls steps and their hooks by.
HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__


def steps_around(frame: FrameType | None, enough: int = 1) -> int:
    """How many there are, of whichever optimizers; it counts up to `enough`."""
    found = 0
    while frame is not None and found < enough:
        found += frame.f_code.co_filename == HOOKED_STEP.co_filename and (
            HOOKED_STEP.co_name in frame.f_code.co_name  # Dynamo changes both code and name
        )
        frame = frame.f_back
    return found
