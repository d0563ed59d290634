"""`torch.autocast` by its rules for CUDA on any device, so that its casts and what it keeps for
backward can be counted without a GPU.

A stand-in: it casts the operands of the functions that a model calls, as autocast casts those of
the operators below them, so that functions made of several operators follow the rule of their name.
Casts of parameters are kept until the region ends, as autocast keeps them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

WIDEST = ("cat", "stack", "addcmul", "addcdiv", "atan2", "dot", "cross", "grid_sample")
SPELLED = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "__rpow__": "pow"}


def _names(entries: Any) -> frozenset[str]:
    return frozenset(entry[0] for entry in entries)


_lists = AutocastTestLists(torch.device("cpu"))
LOWERED = _names([*_lists.torch_fp16, *_lists.nn_fp16, *_lists.methods_fp16]) | {
    "lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention",
}  # fmt: skip
WIDENED = _names([*_lists.torch_fp32, *_lists.nn_fp32, *_lists.methods_fp32]) | {
    "layer_norm", "group_norm", "mse_loss", "smooth_l1_loss", "softplus", "norm",
    "binary_cross_entropy_with_logits",
}  # fmt: skip
# Asked for a float32 result; on CUDA the kernel reads the operand as it is.
WIDENED_INSIDE = frozenset(
    ["softmax", "log_softmax", "cross_entropy", "sum", "prod", "cumsum", "cumprod"]
)


class CudaRules(TorchFunctionMode):
    """A region like `torch.autocast("cuda", dtype)`."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype
        self._kept: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = SPELLED.get(name, name)
        args, kwargs = tree_map(self._cast_for(name, args), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cast_for(self, name: str, args: Any) -> Any:
        if name in LOWERED:
            return self._lower
        if name in WIDENED_INSIDE:
            return self._widen_uncounted
        if name in WIDENED or (name in WIDEST and any(map(_is_float32, tree_leaves(args)))):
            return self._widen
        return lambda value: value

    def _lower(self, value: Any) -> Any:
        if not _is_float32(value):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._dtype)
        if id(value) not in self._kept:
            self._kept[id(value)] = value.to(self._dtype)
        return self._kept[id(value)]

    def _widen(self, value: Any) -> Any:
        is_low = isinstance(value, torch.Tensor) and value.dtype is self._dtype
        return value.float() if is_low else value

    def _widen_uncounted(self, value: Any) -> Any:
        with _disable_current_modes():
            return self._widen(value)


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32
