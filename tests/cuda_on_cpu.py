"""As a plugin of pytest: the CUDA kernels of PyTorch's operators are the CPU's, on the same memory.

For `scripts/emulated_cuda.py`, whose CUDA device has the host's memory. Each operator that has a
CUDA kernel gets one that hands CPU tensors over the same memory to the CPU's kernel. Kernels that
only CUDA has, for attention and recurrent cells, are written here.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cuda_graphs_on_cpu import recorded
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# On metadata alone, or as on any device.
KEPT = set(
    """
    as_strided view _reshape_alias view_as_real view_as_complex unfold empty.memory_format
    empty_strided set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
    resize_ record_stream is_set_to _has_compatible_shallow_copy_type is_pinned _pin_memory
    _efficientzerotensor
    """.split()
)
# Whose kernels are found by the tensors' device.
ALSO = ["aten::copy_", "aten::convolution", "aten::convolution_backward"]
# They may be given tensors on the CPU beside others.
MIXED = ("copy_", "index", "_index_put", "_to_copy", "embedding")
# CUDA's kernels raise versions themselves, where the CPU's leave it to what they are made of.
RAISE_VERSIONS = ("_foreach", "_fused_adam", "_fused_sgd")
CpuGenerator, AnyGenerator = torch.Generator, torch._C.Generator
Kernel = Callable[..., Any]
_generators: dict[int, tuple[torch.Generator, int, torch.Generator]] = {}

torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)


def on_cpu(value: Any) -> Any:
    """A CPU tensor over the memory of one on CUDA; a generator with the same seed."""
    if isinstance(value, Tensor):
        return _alias(value) if value.device.type == "cuda" else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, AnyGenerator) and value.device.type == "cuda":
        seed = value.initial_seed()
        if _generators.get(id(value), (None, None))[1] != seed:
            _generators[id(value)] = value, seed, CpuGenerator("cpu").manual_seed(seed)
        return _generators[id(value)][2]
    return value


def _alias(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    there = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    alias.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())
    alias = torch._conj(alias) if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


def on_cuda(value: Any) -> Any:
    """A CUDA tensor of the same numbers as one on the CPU."""
    if not isinstance(value, Tensor):
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    if value.numel():
        _alias(moved).copy_(value)
    return moved


def kernel_of(operator: Any) -> Kernel:
    """A CUDA kernel that runs the CPU's."""
    schema, name = operator._schema, operator.__name__
    arguments = schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    returns_written = any(r.alias_info is not None for r in schema.returns)
    may_be_mixed = name.startswith(MIXED)
    raises_versions = name.startswith(RAISE_VERSIONS)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
        sized = [t for t in _tensors(given) if t.dim()]
        if not may_be_mixed and len({t.device for t in sized}) > 1:
            raise RuntimeError(f"{name}: tensors on several devices")
        low = tree_map(on_cpu, given)
        for argument in arguments:  # a number that was a tensor
            if str(argument.type) == "Tensor" and isinstance(low.get(argument.name), (int, float)):
                low[argument.name] = torch.tensor(low[argument.name], device="cpu")
        if low.get("half_to_float"):
            low |= {"self": low["self"].float(), "half_to_float": False}
        narrow = low.get("input_dtype")  # of what the gradient, which is wider, is for
        if narrow is not None:
            low["input_dtype"] = low["grad_output"].dtype
        result = operator(**low)
        result = result if narrow is None else result.to(narrow)
        for tensor, alias in zip(
            _tensors([given.get(n) for n in written]),
            _tensors([low.get(n) for n in written]),
            strict=True,
        ):
            if tensor.shape != alias.shape:
                tensor.resize_(alias.shape)
                _alias(tensor).copy_(alias)
            if raises_versions:
                torch.autograd.graph.increment_version(tensor)
        if returns_written:
            results = [given[n] for n in written]
            return results[0] if len(schema.returns) == 1 else (*results,)
        return tree_map(on_cuda, result)

    return torch._dynamo.disable(run)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _scores(q: Tensor, k: Tensor, bias: Any, is_causal: bool, factor: float) -> Tensor:
    scores = q @ k.mT * factor
    scores = scores if bias is None else scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _for_each_query(value: Tensor, heads: int) -> Tensor:
    """Keys or values of few heads, once for each head that asks for them."""
    return value.repeat_interleave(heads // value.shape[1], 1)


def _attended(given: Any, bias: Any, dropout: float, is_causal: bool, scale: Any) -> Any:
    assert not dropout
    q, k, v, bias = (None if t is None else on_cpu(t).float() for t in (*given, bias))
    k, v = (_for_each_query(t, q.shape[1]) for t in (k, v))
    scores = _scores(q, k, bias, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    out = (scores.softmax(-1) @ v).to(given[0].dtype)
    return on_cuda(_laid_out(out)), on_cuda(scores.logsumexp(-1))


def _laid_out(value: Tensor) -> Tensor:
    """Of (batch, heads, places, features), as CUDA's attention lays it out."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _attend_backward(grad: Tensor, given: Any, is_causal: bool, scale: Any) -> list[Any]:
    given = [t for t in given if t is not None]
    grad, q, few_k, few_v, *bias = (on_cpu(t).float() for t in (grad, *given))
    k, v = (_for_each_query(t, q.shape[1]) for t in (few_k, few_v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = _scores(q, k, bias[0] if bias else None, is_causal, factor).softmax(-1)
    towards = grad @ v.mT
    inner = weights * (towards - (weights * towards).sum(-1, keepdim=True))
    of_k, of_v = inner.mT @ q * factor, weights.mT @ grad
    of_k, of_v = (t.unflatten(1, (few_k.shape[1], -1)).sum(2) for t in (of_k, of_v))
    found = [_laid_out(g) for g in (inner @ k * factor, of_k, of_v)]
    found += [inner.sum_to_size(b.shape) for b in bias]
    return [on_cuda(g.to(t.dtype)) for g, t in zip(found, given, strict=True)]


def _efficient(q, k, v, attn_bias, lse=False, dropout_p=0.0, is_causal=False, *, scale=None):
    counts = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]
    return *_attended((q, k, v), attn_bias, dropout_p, is_causal, scale), *counts


def _efficient_backward(
    grad, q, k, v, attn_bias, out, lse, seed, offset, p, mask, is_causal=False, *, scale=None
):
    found = _attend_backward(grad, (q, k, v, attn_bias), is_causal, scale)
    return *found[:3], found[3] if len(found) > 3 and mask[3] else torch.empty(0, device="cuda")


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    drawn = [torch.zeros(n, dtype=torch.uint64, device="cuda") for n in ((2,), ())]
    sizes = none, none.clone(), q.shape[2], k.shape[2]
    of_dropout = *drawn, torch.empty(0, dtype=q.dtype, device="cuda")
    return *_attended((q, k, v), None, dropout_p, is_causal, scale), *sizes, *of_dropout


def _flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, is_causal, seed, offset, *, scale=None
):
    return (*_attend_backward(grad, (q, k, v), is_causal, scale),)


def _lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    terms = [input_gates, hidden_gates, *(b for b in (input_bias, hidden_bias) if b is not None)]
    i, f, g, o = sum(on_cpu(t).float() for t in terms).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * on_cpu(cx).float() + i * g
    found = o * cy.tanh(), cy, torch.cat([i, f, g, o], -1)
    return tuple(on_cuda(t.to(input_gates.dtype)) for t in found)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = on_cpu(workspace).float().chunk(4, -1)
    tanh = on_cpu(cy).float().tanh()
    of_h, of_c = (0 if t is None else on_cpu(t).float() for t in (grad_hy, grad_cy))
    of_c = of_c + of_h * o * (1 - tanh * tanh)
    inner = [of_c * g * i * (1 - i), of_c * on_cpu(cx).float() * f * (1 - f)]
    inner += [of_c * i * (1 - g * g), of_h * tanh * o * (1 - o)]
    gates = torch.cat(inner, -1)
    of_bias = gates.sum(0) if has_bias else torch.empty(0, device="cpu")
    return tuple(on_cuda(t.to(workspace.dtype)) for t in (gates, of_c * f, of_bias))


def _gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    of_input, of_hidden = (
        (on_cpu(gates).float() + (0 if bias is None else on_cpu(bias).float())).chunk(3, -1)
        for gates, bias in ((input_gates, input_bias), (hidden_gates, hidden_bias))
    )
    reset, update = ((of_input[i] + of_hidden[i]).sigmoid() for i in range(2))
    new, state = (of_input[2] + reset * of_hidden[2]).tanh(), on_cpu(hx).float()
    workspace = torch.cat([reset, update, new, state, of_hidden[2]], -1)
    hy = new + update * (state - new)
    return tuple(on_cuda(t.to(input_gates.dtype)) for t in (hy, workspace))


def _gru_cell_backward(grad_hy, workspace, has_bias):
    reset, update, new, state, hidden = on_cpu(workspace).float().chunk(5, -1)
    of_h = on_cpu(grad_hy).float()
    of_new = of_h * (1 - update) * (1 - new * new)
    of_gates = [of_new * hidden * reset * (1 - reset), of_h * (state - new) * update * (1 - update)]
    gates = [torch.cat([*of_gates, last], -1) for last in (of_new, of_new * reset)]
    biases = [g.sum(0) if has_bias else torch.empty(0, device="cpu") for g in gates]
    return tuple(on_cuda(t.to(workspace.dtype)) for t in (*gates, of_h * update, *biases))


def _histogram(self, bins=100, min=0, max=0):
    counts = on_cpu(self).double().histc(bins, float(min), float(max))
    return on_cuda(counts.to(self.dtype))


def _without_library(*args: Any) -> bool:
    return False


LIBRARY_ASKED_FOR = [
    f"_use_{library}_ctc_loss{overload}"
    for library in ("cudnn", "miopen")
    for overload in ("", ".Tensor")
]


OWN: dict[str, Kernel] = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    **dict.fromkeys(LIBRARY_ASKED_FOR, _without_library),
    "histc": _histogram,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
}


def kernels() -> Iterator[tuple[str, Kernel]]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for full in itertools.chain(registered, ALSO):
        namespace, name = full.split("::")
        if namespace != "aten" or name in KEPT or name in OWN:
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:
            yield name, kernel_of(operator)
    yield from OWN.items()


LIBRARY = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that a kernel takes the place of another is meant
    for _name, _kernel in kernels():
        LIBRARY.impl(_name, recorded(_name, _kernel), "CUDA", allow_override=True)
