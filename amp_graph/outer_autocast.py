"""Autocast as it may be on around a call: where it may be, and runs without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from amp_graph.modules import Run

KINDS = ("cpu", "cuda", "mps", "xpu")


def autocast_devices() -> tuple[str, ...]:
    """The kinds of device that code may run under autocast on, each once; one is PyTorch's
    accelerator, if it is registered by a package of its own."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in KINDS:
        return KINDS
    return (*KINDS, accelerator.type)


def autocast_depth() -> int:
    """Return how many autocast contexts this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def without_autocast(run: Run, device_types: Iterable[str] | None = None) -> Run:
    """Shield `run`, whose casts are all written out, from autocast around it, on all devices unless
    some are given."""
    kinds = tuple(k for k in device_types or autocast_devices() if k != "meta")

    def shielded(*args: Any, **kwargs: Any) -> Any:
        enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        if not enabled:
            return run(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for kind in enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return run(*args, **kwargs)

    return shielded
