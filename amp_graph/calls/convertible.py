"""The models that can be converted, and why others cannot.

Private name of PyTorch used here:

    LazyModuleMixin._infer_parameters    what the first call of a lazy module begins with
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_graph.dtypes import dtype_name
from amp_graph.errors import AmpGraphError
from amp_graph.modules import is_compiled, unwrapped
from amp_graph.snapshots import is_incomplete


def check_model(model: Any, function: str = "convert()") -> None:
    """Refuse what is no model in float32 that a call computes something of. Raises AmpGraphError,
    which names the function that it was given to."""
    if not isinstance(model, nn.Module):
        raise AmpGraphError(f"{function} takes a torch.nn.Module, not {type(model).__name__}")
    name, inner = type(model).__name__, unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise AmpGraphError(f"{name} is scripted; convert the module it was scripted from")
    if why := why_not_at_once(type(inner).forward):
        raise AmpGraphError(f"{name}.forward {why}; convert the modules that it calls")
    if is_compiled(inner):
        raise AmpGraphError(
            f"{name} is compiled by torch.compile; convert the model as it was before, and leave "
            f'compiling to Policy(compiler="inductor")'
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes:
        raise AmpGraphError(f"{name} has no floating-point parameters; there is nothing to convert")
    if torch.float32 not in dtypes:
        found = ", ".join(sorted(map(dtype_name, dtypes)))
        raise AmpGraphError(
            f"{name} has parameters in {found} only; conversion starts from float32 (model.float())"
        )


def why_not_at_once(function: Any) -> str:
    """Why a call of a function runs nothing of it yet, or ""."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is asynchronous"
    return "is a generator" if inspect.isgeneratorfunction(function) else ""


def has_no_call(model: nn.Module) -> bool:
    """Whether a call of it can only raise, as of a container of others."""
    kind: Any = type(model)
    is_plain = kind.forward is nn.Module.forward and kind.__call__ is nn.Module.__call__
    return is_plain and "forward" not in vars(model)


def initialize(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Do what the first call of a lazy module begins with, if it is one: Dynamo captures that of
    the modules inside, but not that of the outermost."""
    if is_incomplete(model):
        model._infer_parameters(model, args, kwargs)  # type: ignore[operator]


def check_initialized(model: nn.Module) -> None:
    """Refuse a model that has parameters without a size. Raises AmpGraphError."""
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise AmpGraphError(
            f"{type(model).__name__} has parameters that are not initialised, as lazy layers have "
            f"before their first call; call it once on a batch"
        )
