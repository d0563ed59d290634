"""Whether attention is causal is decided while a model is captured, as an `if` would be.

    scaled_dot_product_attention(q, k, v, is_causal=length > 1)

So do models with a cache of keys, whose prompts have many positions and whose next tokens one.
Once Dynamo has seen two lengths `length > 1` is a symbol to it, which attention refuses, so that
the graph would end at each layer. Here a guard says which it is. What depends on data ends it.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch._dynamo.variables.TorchInGraphFunctionVariable.call_function, .value
    torch._dynamo.variables.tensor.SymNodeVariable.sym_num, .evaluate_expr
    torch.fx.experimental.symbolic_shapes.has_free_unbacked_symbols
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.nn.functional import scaled_dot_product_attention

from amp_graph.capture.replaced import method_inside

FLAG, PLACE = "is_causal", 5


def causal_flags_known() -> contextlib.AbstractContextManager[None]:
    """Within, Dynamo decides such a flag."""
    return method_inside(TorchInGraphFunctionVariable, "call_function", _call)


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if function.value is scaled_dot_product_attention:
        kwargs = {name: _decided(v) if name == FLAG else v for name, v in kwargs.items()}
        args = [_decided(v) if position == PLACE else v for position, v in enumerate(args)]
    return method(function, frame, args, kwargs)


def _decided(given: Any) -> Any:
    flag = given.realize()
    is_symbol = isinstance(flag, SymNodeVariable) and isinstance(flag.sym_num, torch.SymBool)
    if not is_symbol or has_free_unbacked_symbols(flag.sym_num):
        return flag
    return ConstantVariable.create(flag.evaluate_expr())
