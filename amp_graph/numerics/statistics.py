"""Compare the numbers of one tensor in mixed precision with those in float32.

float32   1.0   1e-9   7e4    mixed (float16)   1.0   0   inf
underflow 1/3, overflow 1/3
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Statistics:
    """A tensor of a mixed run beside that of the float32 run.

    error: the distance of the two in the 2-norm, relative to float32's norm, over the numbers that
        are finite in float32; infinite where the mixed one is not finite, NaN if there is nothing
        to compare.
    underflow: the share of values that are not zero in float32 and zero in mixed.
    overflow: the share that is finite in float32 and not in mixed.
    smallest, largest: the exponents of 2 of the smallest and the largest magnitude of the mixed
        tensor, zeros, infinities and NaN left out; None if it has no other values.
    """

    error: float
    underflow: float
    overflow: float
    smallest: int | None
    largest: int | None
    count: int


def statistics(reference: torch.Tensor, mixed: torch.Tensor) -> Statistics:
    """Compare a tensor with that of the float32 run."""
    r, m = numbers(reference), numbers(mixed)
    count = max(r.numel(), 1)
    finite = r.isfinite()
    same = finite & m.isfinite()
    overflow = int((finite & ~m.isfinite()).sum())
    underflow = int(((r != 0) & (m == 0)).sum())
    norm = float(r[finite].norm())
    distance = float((m[same] - r[same]).norm())
    error = math.inf if overflow else distance / norm if norm else float(distance > 0)
    error = error if bool(finite.any()) else math.nan
    smallest, largest = exponent_range(m)
    return Statistics(error, underflow / count, overflow / count, smallest, largest, r.numel())


def numbers(values: torch.Tensor) -> torch.Tensor:
    """The values as one float64 vector; a complex one counts as two."""
    values = values.detach()
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if parts.device.type == "mps":  # which has no float64
        parts = parts.cpu()
    return parts.double().flatten()


def exponent_range(values: torch.Tensor) -> tuple[int | None, int | None]:
    sizes = values[values.isfinite() & (values != 0)].abs()
    if not sizes.numel():
        return None, None
    return exponent(float(sizes.min())), exponent(float(sizes.max()))


def exponent(number: float) -> int:
    """floor(log2(number)) of a positive number."""
    return math.frexp(number)[1] - 1


def exponents(values: torch.Tensor) -> Counter[int]:
    """How many values have each exponent of 2; zeros, infinities and NaN are not counted."""
    sizes = numbers(values).abs()
    sizes = sizes[sizes.isfinite() & (sizes != 0)]
    found, counts = torch.unique(torch.frexp(sizes).exponent, return_counts=True)
    return Counter({int(e) - 1: int(n) for e, n in zip(found, counts, strict=True)})


def relative_error(reference: list[torch.Tensor], mixed: list[torch.Tensor]) -> float:
    """The distance of two lists of tensors, each taken as one vector, relative to the first;
    infinite if they differ in shape, as what is chosen by its values may, and NaN if there is
    nothing to compare."""
    if not reference:
        return math.nan
    if [r.shape for r in reference] != [m.shape for m in mixed]:
        return math.inf
    r, m = (torch.cat([*map(numbers, ts)]) for ts in (reference, mixed))
    return statistics(r, m).error


def not_finite(tensors: list[torch.Tensor]) -> float:
    """The share of the values of some tensors that are not finite; 0 if there are none."""
    count = sum(t.numel() for t in tensors)
    return sum(int((~t.isfinite()).sum()) for t in tensors) / max(count, 1)
