"""Batches: what a user gives that a model is to be called on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from amp_graph.errors import AmpGraphError, in_brief

Batch: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""A tensor, positional arguments as a sequence, or keyword arguments as a mapping."""


def call_with(call: Callable[..., Any], batch: Batch) -> Any:
    """Call on a batch."""
    args, kwargs = arguments_of(batch)
    return call(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch is a tensor, a sequence of positional or a mapping of keyword arguments. Raises
    AmpGraphError."""
    if isinstance(batch, Mapping):
        return (), {**batch}
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise AmpGraphError(
            f"a batch is a tensor, a sequence of positional arguments or a mapping of keyword "
            f"arguments, not {in_brief(batch)}"
        )
    return (*batch,), {}
