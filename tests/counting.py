"""Counts of what really ran: matrix products by precision, casts with their bytes, operators.

The counters of products and casts are dispatch modes below autograd. By default Dynamo runs a
compiled model uncompiled while a dispatch mode is active, which would count the user's own float32
code instead; `ignore_compile_internals` keeps the compiled code in use and hides from the mode what
runs while compiling. The counter of operators is a function mode: it sees the operators that a
graph calls before they fall apart into others.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOW = (torch.bfloat16, torch.float16)
CONVERTIBLE = (*LOW, torch.float32)

# Kernels whose arithmetic is a product of matrices; one with a vector is not. Composite operators
# (linear, conv2d, lstm) reach a dispatch mode only under inference_mode, and then their parts do
# not: nothing counts twice.
PRODUCTS = frozenset(
    """
    mm addmm bmm baddbmm addbmm matmul linear bilinear einsum _addmm_activation
    _grouped_mm grouped_mm grouped_mm_fallback grouped_mm_fallback_backward _trilinear
    convolution _convolution convolution_overrideable mkldnn_convolution slow_conv_transpose2d
    _slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution_backward conv_tbc_backward
    _mkldnn_linear _linear_pointwise _convolution_pointwise mkldnn_linear mkldnn_linear_backward
    scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _flash_attention_forward _efficient_attention_forward _native_multi_head_attention
    mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """.split()
)
CASTS = frozenset(["_to_copy", "to", "type_as", "convert_element_type"])
COPIES = frozenset(["copy_", "copy", "_foreach_copy_"])


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class DispatchCounter(TorchDispatchMode):
    """Shows every operator call to `record`, which subclasses define."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1] if hasattr(func, "_schema") else str(func)
        self.record(name, args, result)
        return result

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        raise NotImplementedError


# Reads of tensors' values by the host: on an accelerator the host waits for it.
HOST_READS = frozenset(["_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"])


class HostReads(DispatchCounter):
    """Counts the times that Python asks for a value in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.count += name in HOST_READS


class MatmulCounter(DispatchCounter):
    """Counts matrix products and convolutions by the dtype of their first floating operand.

    Calls made by the autograd engine count as `backward`, all others as `forward`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[tuple[str, torch.dtype]] = Counter()
        self.backward: Counter[tuple[str, torch.dtype]] = Counter()

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name not in PRODUCTS:
            return
        dtypes = [t.dtype for t in tensors(args) if t.is_floating_point() or t.is_complex()]
        if dtypes:
            phase = self.backward if in_backward() else self.forward
            phase[name, dtypes[0]] += 1

    @staticmethod
    def share(calls: Counter[tuple[str, torch.dtype]]) -> float:
        """Low-precision calls among those that could be: float64 and complex are left out."""
        total = sum(n for (_, dtype), n in calls.items() if dtype in CONVERTIBLE)
        low = sum(n for (_, dtype), n in calls.items() if dtype in LOW)
        return low / total if total else 1.0

    @property
    def low_share(self) -> float:
        return self.share(self.forward)

    @property
    def backward_low_share(self) -> float:
        return self.share(self.backward)

    def high_calls(self) -> dict[str, int]:
        """The forward calls that ran in float32, by operator."""
        return {name: n for (name, dtype), n in self.forward.items() if dtype == torch.float32}


@dataclass
class Traffic:
    """Casts between float32 and a low precision: how many, and the bytes read plus written."""

    casts: int = 0
    bytes: int = 0
    shapes: Counter[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=Counter)

    def add(self, source: torch.Tensor, result: torch.Tensor) -> None:
        pair = {source.dtype, result.dtype}
        if torch.float32 not in pair or pair.isdisjoint(LOW):
            return
        self.casts += 1
        self.bytes += result.numel() * (source.element_size() + result.element_size())
        self.shapes[result.dtype, tuple(result.shape)] += 1


class CastCounter(DispatchCounter):
    """Counts casts between float32 and a low precision, forward and backward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = Traffic()
        self.backward = Traffic()

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        traffic = self.backward if in_backward() else self.forward
        if name in CASTS:
            traffic.add(args[0], result)
        elif name in COPIES:
            for target, source in zip(tensors(args[0]), tensors(args[1]), strict=True):
                # copy_ broadcasts: what is written sets the size.
                traffic.add(source, target)


# What graphs call: ATen operators, or their Python bindings, which are not written in Python.
OPERATORS = (torch._ops.OpOverload, types.BuiltinFunctionType, types.MethodDescriptorType)
CONVERSIONS = (torch.ops.aten._to_copy.default, torch.Tensor.to)


class OperatorCounter(TorchFunctionMode):
    """Counts the operators on float32 or low-precision tensors that emitted graphs call in
    a forward pass, but for conversions. One is low if its floating results are, or its operands if
    it has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.low = self.total = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OPERATORS) and func not in CONVERSIONS:
            operands, results = floats((args, kwargs)), floats(result)
            self.total += bool(operands or results)
            self.low += any(t.dtype in LOW for t in results or operands)
        return result

    def watch_graphs(self) -> None:
        """Count in every graph that is made from now on, in this process."""
        recompile = fx.GraphModule.recompile

        def recompile_watched(module):
            code = recompile(module)
            if type(module).__name__ == "AmpGraph":
                type(module).forward = self._counted(type(module).forward)
            return code

        fx.GraphModule.recompile = recompile_watched

    def _counted(self, forward):
        def counted(*args):
            if in_backward() or torch._C._len_torch_function_stack() or is_traced(args):
                return forward(*args)
            with self:
                return forward(*args)

        return counted


def floats(tree: Any) -> list[torch.Tensor]:
    return [t for t in tensors(tree) if t.dtype in CONVERTIBLE]


def is_traced(args: Any) -> bool:
    return any(isinstance(t, torch._subclasses.FakeTensor) for t in tensors(args))


class Names(DispatchCounter):
    """The operators that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.names.append(name)
