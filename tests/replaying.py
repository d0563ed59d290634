"""A step recorded operator by operator and run again on the same tensors, as a CUDA graph is."""

from __future__ import annotations

from typing import Any

import torch
from counting import HOST_READS, tensors
from torch.utils._python_dispatch import TorchDispatchMode


class Recording(TorchDispatchMode):
    """Records what runs below autograd. A replay runs the same operators, with results going where
    the recorded ones went; Python does not run. A read by the host while recording raises."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in HOST_READS:
            raise RuntimeError(f"the host reads a value while a step is recorded: {func}")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self._calls:
            result = func(*args, **kwargs)
            for there, here in zip(tensors(recorded), tensors(result), strict=True):
                if there.data_ptr() != here.data_ptr():
                    there.copy_(here)
