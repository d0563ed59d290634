"""Calls that would do something else in a graph than in Python end the graph, and Python runs them.

    torch.set_default_dtype(torch.float64)     a setting of the process; captured, it would be made
    torch.use_deterministic_algorithms(True)   once, as the graph is retraced, and never again
    asyncio.run(self.encode(x))                a coroutine, which Dynamo runs where it is made
    self.rng.randint(1, 9)                     of a random.Random, whose state would be put back
    random.randint(1, 9)                       a tensor in a graph, of which Python makes no size,
                                               and nothing of the function would be captured
    ctx.set_materialize_grads(False)           of a custom function with several results, whose
                                               backward is captured as if each had a gradient

Private names of PyTorch used here:

    torch._C._set_*                            what settings are made by
    torch._dynamo.variables.TorchInGraphFunctionVariable.call_function
    torch._dynamo.variables.UserFunctionVariable, NestedUserFunctionVariable
                                               .call_function, .get_code
    torch._dynamo.variables.AutogradFunctionApplyVariable.trace_forward_graph, TensorVariable
    torch._dynamo.variables.misc.RandomVariable.call_method
    torch._dynamo.variables.UserDefinedObjectVariable.call_function, .is_supported_random
    torch._dynamo.side_effects.SideEffects.store_attr_mutations
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch._dynamo.variables import (
    NestedUserFunctionVariable,
    TensorVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
)
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import RandomVariable

from amp_graph.dynamo_changes.ended_graphs import can_end, end_graph
from amp_graph.dynamo_changes.replaced import those_of

NAMES = {
    torch: (
        "seed",
        "set_default_dtype",
        "set_default_tensor_type",
        "set_deterministic_debug_mode",
        "set_float32_matmul_precision",
        "set_warn_always",
        "use_deterministic_algorithms",
    ),
    torch.backends.cuda: (
        "allow_fp16_bf16_reduction_math_sdp",
        "enable_cudnn_sdp",
        "enable_flash_sdp",
        "enable_math_sdp",
        "enable_mem_efficient_sdp",
        "preferred_blas_library",
        "preferred_linalg_library",
    ),
    torch.backends.cudnn: ("set_flags",),
    torch.backends.mkldnn: ("set_flags",),
    torch.cuda: ("set_sync_debug_mode",),
}
PREFIXES = (
    "_set_blas_preferred",
    "_set_cublas_",
    "_set_cudnn_",
    "_set_default_",
    "_set_deterministic_",
    "_set_float32_",
    "_set_linalg_preferred",
    "_set_math_sdp_",
    "_set_mkldnn_",
    "_set_nnpack_",
    "_set_sdp_use_",
    "_set_warnAlways",
)
SETTERS = [
    *(f for place, names in NAMES.items() for f in those_of(place, names)),
    *(getattr(torch._C, name) for name in dir(torch._C) if name.startswith(PREFIXES)),
]


def is_coroutine(code: types.CodeType) -> bool:
    """Whether Python suspends frames of this code, at which Dynamo would end the process."""
    return bool(code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def _set(method: Any, function: Any, *called: Any) -> None:
    end_graph("a setting of the process", function.value)


def _call(method: Any, function: Any, *called: Any) -> Any:
    if is_coroutine(function.get_code()):
        end_graph("a coroutine", function)
    return method(function, *called)


def _draw(method: Any, generator: Any, *called: Any) -> Any:
    if generator.source:
        end_graph("a random number of Python's", generator)
    return method(generator, *called)


def _draw_from_all(method: Any, function: Any, frame: Any, *called: Any) -> Any:
    """Where no graph can end, as in a loop, it may still do as a tensor."""
    if function.is_supported_random() and can_end(frame):
        end_graph("a random number of Python's", function)
    return method(function, frame, *called)


def _trace_forward(method: Any, function: Any, frame: Any, ctx: Any, *traced: Any) -> Any:
    found = method(function, frame, ctx, *traced)
    kept = frame.output.side_effects.store_attr_mutations.get(ctx, {})
    told = kept.get("materialize_grads")  # as `set_materialize_grads` keeps it
    _, result, *_ = found
    if told is not None and not told.as_python_constant() and _has_several(result):
        end_graph("a custom function with results that may have no gradient", ctx)
    return found


def _has_several(result: Any) -> bool:
    """Whether gradients may come in for several tensors. No gradient comes for one alone."""
    tensors = (v.realize() for v in getattr(result, "items", ()))
    return sum(isinstance(v, TensorVariable) and v.dtype.is_floating_point for v in tensors) > 1


CALLS = dict.fromkeys(SETTERS, _set)
CHANGES = (
    (UserFunctionVariable, "call_function", _call),
    (NestedUserFunctionVariable, "call_function", _call),
    (AutogradFunctionApplyVariable, "trace_forward_graph", _trace_forward),
    (RandomVariable, "call_method", _draw),
    (UserDefinedObjectVariable, "call_function", _draw_from_all),
)
