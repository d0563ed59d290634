"""The levels of a policy."""

from __future__ import annotations

import enum


class Level(enum.Enum):
    """How far tensors are narrowed for memory and speed; each level does what those before it do.

    SAFE: float32 wherever `torch.autocast` has it. BALANCED: kernels that compute in float32 inside
        keep their tensors in low precision, and on GPUs so do residual streams in bfloat16 (in
        float16 they may outgrow its range). MAX: the fewest bytes that leave denied arithmetic in
        float32.
    """

    SAFE = "safe"
    BALANCED = "balanced"
    MAX = "max"

    def includes(self, other: Level) -> bool:
        order = list(Level)
        return order.index(self) >= order.index(other)


LEVELS = {level.value: level for level in Level}
