"""Dtypes, as people write them and by what they count as."""

from __future__ import annotations

import torch

LOW_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
LOW = tuple(LOW_DTYPES.values())  # the precisions that count as low


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return a dtype's short name: "float16" for `torch.float16`."""
    return str(dtype).removeprefix("torch.")
