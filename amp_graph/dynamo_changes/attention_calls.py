"""Settle arguments of attention while a model is captured.

    scaled_dot_product_attention(q, k, v, is_causal=length > 1)

So do models with a cache of keys, whose prompts have many positions and whose next tokens one.
Once Dynamo has seen two lengths `length > 1` is a symbol to it, which attention refuses, so that
the graph would end at each layer. Here a guard says which it is. What depends on data ends it.

    scaled_dot_product_attention(q, k, v)       of as many positions as a mask has selected

Attention asks whether there are none. Here it is told that there are some; when it runs, it asks
again.

    multi_head_attention_forward(q, k, v, ..., attn_mask=mask)    the mask alone on the CPU

So `nn.Transformer` calls it with a mask that was made on the default device: the model finds the
mask to be causal and drops it, where a capture applies it as given (`causal_masks`). Here the mask
is moved to the others' device.

    with torch.backends.cuda.sdp_kernel(enable_math=False):     deprecated, and unknown to Dynamo

So a model chose kernels before there was `sdpa_kernel`, which Dynamo captures. At the end of such a
block the graph puts back what was enabled when it was captured: a guard says that the same is now.

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable.call_function, .value
    torch._dynamo.variables.TensorVariable.device, .call_method
    torch._dynamo.variables.UserFunctionVariable.call_function
    torch._dynamo.variables.tensor.SymNodeVariable.sym_num, .evaluate_expr
    torch._dynamo.variables.ctx_manager.SDPAKernelVariable.enter
    torch.fx.experimental.symbolic_shapes.has_free_unbacked_symbols
"""

from __future__ import annotations

import contextlib
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    UserFunctionVariable,
    VariableTracker,
)
from torch._dynamo.variables.ctx_manager import SDPAKernelVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

from amp_graph.dynamo_changes.own_guards import hold_in_state
from amp_graph.graphs.fake import none_empty
from amp_graph.patching import method_inside

ARGUMENTS: dict[Any, tuple[str, ...]] = {
    scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    multi_head_attention_forward: tuple(signature(multi_head_attention_forward).parameters),
}

OLD_CHOICE = getattr(torch.backends.cuda, "sdp_kernel", object())  # until it is removed


def attention_kernels_guarded() -> contextlib.AbstractContextManager[None]:
    """Have Dynamo guard, within, which kernels are put back at the end of a block."""
    return method_inside(SDPAKernelVariable, "enter", partial(_enter, _enabled()))


def _are_enabled(kernels: tuple[bool, ...]) -> bool:
    """Whether exactly these kernels are enabled."""
    return _enabled() == kernels


def _enabled() -> tuple[bool, ...]:
    asked = torch.backends.cuda
    return (
        asked.flash_sdp_enabled(),
        asked.mem_efficient_sdp_enabled(),
        asked.math_sdp_enabled(),
        asked.cudnn_sdp_enabled(),
    )


def _enter(outside: tuple[bool, ...], method: Any, block: Any, frame: Any) -> Any:
    if _enabled() == outside:  # else by a block around it, which is captured, too
        hold_in_state(_are_enabled, f"kernels of attention are enabled so: {outside}", outside)
    return method(block, frame)


def _attend(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    names = ARGUMENTS[function.value]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, mask, flag = (given.get(name) for name in ("query", "attn_mask", "is_causal"))
    settled = {}
    if mask is not None:
        settled["attn_mask"] = _beside(query, mask.realize(), frame)
    if flag is not None:
        settled["is_causal"] = _decided(flag.realize())
    named = zip(names, args, strict=False)
    args = [*(settled.get(name, v) for name, v in named), *args[len(names) :]]
    kwargs = {n: settled.get(n, v) for n, v in kwargs.items()}
    with none_empty():
        return method(function, frame, args, kwargs)


def _choose(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    choose: Any = _choose_kernels
    return UserFunctionVariable(choose).call_function(frame, args, kwargs)


def _choose_kernels(
    enable_flash: bool = True,
    enable_math: bool = True,
    enable_mem_efficient: bool = True,
    enable_cudnn: bool = True,
) -> contextlib.AbstractContextManager[None]:
    chosen = (
        (enable_flash, SDPBackend.FLASH_ATTENTION),
        (enable_mem_efficient, SDPBackend.EFFICIENT_ATTENTION),
        (enable_math, SDPBackend.MATH),
        (enable_cudnn, SDPBackend.CUDNN_ATTENTION),
    )
    return sdpa_kernel([kernel for is_enabled, kernel in chosen if is_enabled])


def _decided(flag: Any) -> Any:
    is_symbol = isinstance(flag, SymNodeVariable) and isinstance(flag.sym_num, torch.SymBool)
    if not is_symbol or has_free_unbacked_symbols(flag.sym_num):
        return flag
    return ConstantVariable.create(flag.evaluate_expr())


def _beside(query: Any, mask: Any, frame: Any) -> Any:
    query = None if query is None else query.realize()
    if not (isinstance(query, TensorVariable) and isinstance(mask, TensorVariable)):
        return mask
    if mask.device == query.device or mask.device.type != "cpu":
        return mask
    where = VariableTracker.build(frame, query.device)
    return mask.call_method(frame, "to", [where], {"non_blocking": ConstantVariable.create(True)})


CALLS = dict.fromkeys(ARGUMENTS, _attend) | {OLD_CHOICE: _choose}
CONTEXTS = (attention_kernels_guarded,)
