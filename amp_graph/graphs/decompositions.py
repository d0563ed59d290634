"""ATen spellings for calls that PyTorch spells by naming a type that nobody asked for, or whose
effect fake tensors hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from amp_graph.graphs.aten import CAST
from amp_graph.graphs.attention import ATTENTION, note_kernel
from amp_graph.graphs.cells import CELLS
from amp_graph.graphs.products import contracted

MOVES = ("to", "cpu", "cuda")


def moved(node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor | None:
    """Return the result of a node of Dynamo's that moves a tensor (to a device, a memory format, or
    where another tensor is) and names no type: the tensor itself if it is there already. PyTorch
    would spell the move as a conversion to the type that the tensor has. None for any other node,
    also if the type changes to that of another tensor."""
    given = (*node.args[1:], *node.kwargs.values())
    is_conversion = node.op == "call_method" and node.target in MOVES
    if not is_conversion or any(isinstance(value, torch.dtype) for value in given):
        return None
    source, *options = node.args
    tensor, result = values[source], node.meta.get("example_value")  # type: ignore[index]
    if not isinstance(tensor, Tensor) or not isinstance(result, Tensor):
        return None
    if (tensor.dtype, tensor.layout) != (result.dtype, torch.strided):
        return None
    wanted: Any = node.kwargs.get("memory_format") or torch.preserve_format
    place = 2 if options and isinstance(options[0], fx.Node) else 3  # (other, non_blocking, copy)
    is_copied = node.kwargs.get("copy") or options[place : place + 1] == [True]
    # By strides: one channel is contiguous in either format, and still laid out anew (torch 2.13).
    is_laid_out = wanted is torch.preserve_format or tensor.stride() == result.stride()
    if tensor.device == result.device and is_laid_out and not is_copied:
        return tensor
    elsewhere: Tensor = CAST(tensor, device=result.device, memory_format=wanted)
    return elsewhere


def convert_like(
    tensor: Tensor,
    other: Tensor,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Convert to the type of another tensor by naming that type, so that casting the other tensor
    neither changes the result nor costs anything."""
    if tensor.layout is not other.layout:
        return NotImplemented
    if (tensor.dtype, tensor.device) == (other.dtype, other.device):
        if not copy and memory_format in (None, torch.preserve_format):
            return tensor
    target = (other.device, other.dtype, non_blocking, copy)
    return tensor.to(*target, memory_format=memory_format or torch.preserve_format)


def drop_if_active(tensor: Tensor, p: float, train: bool) -> Any:
    """Return the very tensor that is given if dropout drops nothing, so that a write into one
    reaches the other. On fake tensors PyTorch returns a copy (torch 2.13), which would hide that.
    """
    return NotImplemented if train and p != 0 else tensor


def spell_out_but_products(equation: str, tensors: Any, *, path: Any = None) -> Any:
    """Decompose an einsum that is not one matrix product.

    One that contracts nothing has element-wise products, sums and views, in float32 under autocast:
    an outer product, as of positions and frequencies in rotary embeddings, or a trace. One of more
    than two operands is computed pair by pair; some pairs are matrix products, others element-wise.
    """
    if len(tensors) <= 2 and contracted(equation):
        return NotImplemented
    return aten.einsum.default.decompose(equation, tensors, path=path)


aten = torch.ops.aten
DROPOUTS = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout)

DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    **{packet.default: drop_if_active for packet in DROPOUTS},
    ATTENTION: note_kernel,
    **CELLS,
    aten.einsum.default: spell_out_but_products,
    torch.ops.aten.to.other: convert_like,
    torch.ops.aten.type_as.default: convert_like,
}
