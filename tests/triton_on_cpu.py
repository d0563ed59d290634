"""As a plugin of pytest: what Triton's interpreter, which runs kernels on the CPU, lacks.

For `scripts/emulated_cuda.py`, where Inductor's kernels are interpreted (`TRITON_INTERPRET=1`).
Functions of CUDA's library of mathematics have no meaning to the interpreter, which returns None.
Here they are PyTorch's of the same name. Numbers that it makes bfloat16 it cuts off, where a GPU
rounds them to the nearest, and of bfloat16 matrices it multiplies the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

NAMES = """
acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor
fmod hypot isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan
tanh trunc
""".split()
OTHER = {"nearbyint": torch.round, "rint": torch.round, "fabs": torch.abs, "div_rn": torch.div}


def interpreted(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function of PyTorch's, of the values of Triton's interpreter."""

    def call(*args: Any) -> Any:
        values = torch.broadcast_tensors(*(torch.from_numpy(a.handle.data) for a in args))
        found = function(*values)
        scalar = tl.int1 if found.dtype is torch.bool else args[0].type.scalar
        of = args[0].type
        kind = tl.block_type(scalar, of.shape) if of.is_block() else scalar
        return tl.core.tensor(TensorHandle(found.numpy(), scalar), kind)

    return call


def _convert(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Convert numbers between types; of bfloat16 there are the bits, in NumPy."""
    if (given, wanted) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
        return rounded.view(torch.uint16).numpy().reshape(values.shape)
    return _convert_other(values, given, wanted, rounding)


def _widened(value: Any) -> Any:
    if value.dtype.scalar != tl.bfloat16:
        return value
    numbers = torch.from_numpy(value.data).view(torch.bfloat16).float()
    return TensorHandle(numbers.numpy(), tl.float32)


def _multiply(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _multiply_other(builder, _widened(a), _widened(b), *rest)


BUILDER = interpreter.InterpreterBuilder
_multiply_other, BUILDER.create_dot = BUILDER.create_dot, _multiply
_convert_other, interpreter._convert_float = interpreter._convert_float, _convert
for _name, _function in ({n: getattr(torch, n) for n in NAMES} | OTHER).items():
    setattr(libdevice, _name, interpreted(_function))
