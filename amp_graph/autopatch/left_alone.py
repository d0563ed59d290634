"""Why a model that a script calls is left alone, if it is; and calls in which Keras only asks what
sizes come of it, which decide nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from amp_graph.convert import is_converted
from amp_graph.dtypes import dtype_name
from amp_graph.graphs.fake import held_otherwise
from amp_graph.modules import below_compile, has_compiled_forward, is_compiled
from amp_graph.scaling.explicit_scalers import is_grad_scaler_around

AUTOCAST = "the script uses torch.autocast"
BY_SCRIPT = "the script converts it itself"
COMPILED = "the script uses torch.compile"
DECORATED = torch.autocast("cpu")(lambda: None).__code__  # of all that it decorates
FLOAT = ("FloatFunctional", "FXFloatFunctional")  # of torch.ao.nn.quantized, but in float32
ON_META = "its parameters are on the meta device"


def why_not(module: nn.Module, inner: nn.Module) -> str:
    """Why a model is to be left alone, or ""."""
    if is_converted(inner):
        return BY_SCRIPT
    if is_compiled(module) or has_compiled_forward(inner) or any(map(is_compiled, inner.modules())):
        return COMPILED
    if isinstance(inner, torch.jit.ScriptModule):
        return "it is scripted"
    if dtypes := other_dtypes(inner):
        return dtypes
    if any(map(_is_quantised, inner.modules())):
        return "it is quantised"
    for p in inner.parameters():
        if kind := held_otherwise(p):
            return f"its parameters are {kind}"
    if is_on_meta(inner):
        return ON_META
    if is_under_autocast(inner) or _begins_autocast(inner):
        return AUTOCAST
    if is_grad_scaler_around():
        return "the script uses a GradScaler"
    return ""


def _is_quantised(module: nn.Module) -> bool:
    """Whether a module is a quantised one: not a sum that is written so that it can be."""
    kind = type(module)
    return ".quantized" in kind.__module__ and kind.__name__ not in FLOAT


def other_dtypes(module: nn.Module) -> str:
    """Return a sentence about the dtypes of a module's parameters; "" if all are float32."""
    dtypes = _dtypes_of(module)
    found = ", ".join(sorted(map(dtype_name, dtypes)))
    return f"its parameters are {found}" if dtypes != {torch.float32} else ""


def is_in_float32(module: nn.Module) -> bool:
    """Whether all of its parameters that may be are."""
    return _dtypes_of(module) <= {torch.float32}


def _dtypes_of(module: nn.Module) -> set[torch.dtype]:
    """Return the floating-point dtypes of a module's parameters. Single numbers in float64, such as
    a temperature made of one of NumPy's, count as float32: tensors that they meet stay so."""
    return {
        torch.float32 if p.dtype is torch.float64 and p.ndim == 0 else p.dtype
        for p in module.parameters()
        if p.is_floating_point()
    }


def is_around_converted(module: nn.Module) -> bool:
    """Whether `torch.compile` put it around a converted model."""
    inside = below_compile(module)
    return inside is not module and is_converted(inside)


def _begins_autocast(module: nn.Module) -> bool:
    """Whether `forward` as a whole is decorated with `torch.autocast`, by accelerate, say."""

    def is_decorated(function: Any) -> bool:
        return getattr(getattr(function, "__func__", function), "__code__", None) is DECORATED

    return is_decorated(inspect.unwrap(module.forward, stop=is_decorated))


def is_on_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())


def is_under_autocast(module: nn.Module) -> bool:
    return any(torch.is_autocast_enabled(p.device.type) for p in module.parameters())


def is_dry_run(module: nn.Module, given: Any) -> bool:
    """Whether a module that is not on the meta device is asked by Keras what sizes come of what it
    is given, and has stand-ins for its parameters."""
    return _are_described(given) and not is_on_meta(module)


def parameters_by_now(module: nn.Module, given: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module has by now. Keras, which lists them in a way of its own,
    would keep stand-ins if it were asked in a dry run."""
    if type(module).named_parameters is not nn.Module.named_parameters and _are_described(given):
        return (p for _, p in nn.Module.named_parameters(module))
    return module.parameters()


def _are_described(given: Any) -> bool:
    """Whether there are tensors of which no more is there than what they are like."""
    return any(
        x.is_meta if isinstance(x, torch.Tensor) else type(x).__name__ == "KerasTensor"
        for x in tree_leaves(given)
    )
