"""Low-precision weights: the copies of float32 parameters that emitted graphs compute with.

They live as long as the conversion and are brought up to date whenever a graph is about to run,
all of a graph's in one fused call. No cheaper rule is right: fused optimizers and writes through
`.data` change a parameter without a trace (its `_version` stays, seen in torch 2.13), so a copy
that was kept could be stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

# 2.11 - 2.15; what torch.autograd._unsafe_preserve_version_counter does on leaving.
set_versions = torch._C._autograd._unsafe_set_version_counter


class LowPrecisionWeights:
    """The low-precision copies of one model's parameters, shared by all its graphs."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}

    @torch.no_grad()
    def refreshed(
        self, parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Return each parameter in its dtype, as of now.

        A copy is written anew even if nothing is known to have changed. Its version counts up
        only if the parameter's did, so that autograd objects to a backward pass through weights
        that were stepped meanwhile exactly where it would object in float32.
        """
        copies = list(map(self._copy_of, parameters, dtypes))
        lows = [copy.low for copy in copies]
        unchanged = []
        for copy, parameter in zip(copies, parameters, strict=True):
            # Inference tensors count no versions; autograd does not record their use either.
            version = 0 if parameter.is_inference() else parameter._version
            if copy.version == version:
                unchanged.append(copy.low)
            copy.version = version
        versions = [low._version for low in unchanged]
        torch._foreach_copy_(lows, list(parameters))
        set_versions(tuple(unchanged), tuple(versions))
        return lows

    def _copy_of(self, parameter: Tensor, dtype: torch.dtype) -> _Copy:
        key = (id(parameter), dtype)
        copy = self._copies.get(key)
        if copy is None or not copy.fits(parameter):
            copy = self._copies[key] = _Copy(parameter, dtype)
            weakref.finalize(parameter, self._copies.pop, key, None)
        return copy


class _Copy:
    """One parameter in one dtype. It belongs to a parameter object, not to what is in it: a
    parameter may be resized or moved between two calls (`model.to`, `parameter.data = ...`)."""

    __slots__ = ("low", "parameter", "version")

    def __init__(self, parameter: Tensor, dtype: torch.dtype):
        with torch.inference_mode(False):
            self.low = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self.parameter = weakref.ref(parameter)
        self.version = -1

    def fits(self, parameter: Tensor) -> bool:
        low = self.low
        return (
            self.parameter() is parameter
            and low.shape == parameter.shape
            and low.device == parameter.device
            and low.stride() == parameter.stride()
        )
