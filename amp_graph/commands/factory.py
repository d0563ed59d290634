"""From `package.module:function` to a model and what to run it on.

    def demo():                                          def demo():
        return Net(), (torch.randn(4, 8),)                   return Net(), batches, loss

The function takes no arguments. It returns the model and a batch (a tensor, a tuple of positional
arguments or a mapping of keyword arguments) or a list of batches, and perhaps the loss, a function
from the model's output to a scalar.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_graph.errors import AmpGraphError, did_you_mean

HOW = "Give package.module:function, such as my_project.models:small"


@dataclass(frozen=True)
class Subject:
    """A model, at least one batch for it, and its loss if it has one of its own."""

    model: nn.Module
    batches: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor] | None = None


def subject(name: str) -> Subject:
    """Import and call a factory. Modules are looked for in the current folder, too.

    Raises AmpGraphError that says what is wrong with the name, or with what the function returned.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name or module_name.startswith("."):
        raise AmpGraphError(f"{name!r} names no function. {HOW}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        how = f"{HOW}, without .py" if module_name.endswith(".py") else HOW
        raise AmpGraphError(f"cannot import {module_name!r}: {error}. {how}") from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        hint = did_you_mean(function_name, (n for n, v in vars(module).items() if callable(v)))
        raise AmpGraphError(f"module {module_name!r} has no function {function_name!r}.{hint}")
    _check_arguments(name, factory)
    return _checked(name, factory())


def _check_arguments(name: str, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of a function that does not say
        return
    try:
        signature.bind()
    except TypeError as error:
        raise AmpGraphError(
            f"{name} cannot be called without arguments: {error}. {HOW}, without arguments"
        ) from None


def _checked(name: str, made: Any) -> Subject:
    is_pair = isinstance(made, tuple) and len(made) in (2, 3)
    if not is_pair or not isinstance(made[0], nn.Module):
        kinds = type(made).__name__
        if isinstance(made, tuple):
            kinds = f"({', '.join(type(part).__name__ for part in made)})"
        raise AmpGraphError(f"{name} returned {kinds}; it has to return (model, batch[, loss])")
    model, batch, *loss = made
    batches = tuple(batch) if isinstance(batch, list) else (batch,)
    if not batches:
        raise AmpGraphError(f"{name} returned an empty list of batches; give at least one")
    if not all(isinstance(b, (torch.Tensor, tuple, Mapping)) for b in batches):
        raise AmpGraphError(
            f"{name}: a batch is a tensor, a tuple of positional arguments or a mapping of keyword "
            "arguments; several go into a list"
        )
    return Subject(model, batches, *loss)
