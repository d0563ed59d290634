"""CUDA graphs of the device that `cuda_on_cpu` emulates: kernels that are run again.

While a graph is recorded its kernels run, too, as what they return has to have a shape, and what
they wrote over is put back in the end. What a GPU refuses then is refused: a number that the host
reads, memory that goes from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Kernel = Callable[..., Any]
REFUSED = ("_local_scalar_dense", "nonzero", "_is_all_true")
_recording: list[Recorded] = []


class Recorded:
    """In place of `torch.cuda.CUDAGraph`. Memory that it reads and writes stays."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[Callable[[], None]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        _recording.append(self)

    def capture_end(self) -> None:
        _recording.remove(self)
        for written, before in reversed(self._before):
            written.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        for step in self._steps:
            step()

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self._steps.clear()

    def run(self, kernel: Kernel, written: set[str], names: list[str], *args: Any, **kwargs: Any):
        given = dict(zip(names, args, strict=False)) | kwargs
        args, kwargs = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs))
        targets = _tensors([given.get(name) for name in written])
        _recording.remove(self)
        self._before += [(target.detach(), target.detach().clone()) for target in targets]
        _recording.append(self)
        result = kernel(*args, **kwargs)
        made = [t.detach() for t in _tensors(result)]

        def step() -> None:
            for old, new in zip(made, _tensors(kernel(*args, **kwargs)), strict=True):
                if not written:
                    old.copy_(new)

        self._steps.append(step)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def recorded(name: str, kernel: Kernel) -> Kernel:
    """A kernel that graphs record."""
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    names = [a.name for a in schema.arguments]
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _recording:
            return kernel(*args, **kwargs)
        places = {t.device.type for t in _tensors((args, kwargs)) if t.dim() or "copy" in name}
        if name in REFUSED or len(places) > 1:
            raise RuntimeError(f"{name}: the host waits while a CUDA graph is recorded")
        return _recording[-1].run(kernel, written, names, *args, **kwargs)

    return torch._dynamo.disable(run)


torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = Recorded  # type: ignore[misc,assignment]
for _module in (torch.cuda, torch.cuda.graphs):
    _module.is_current_stream_capturing = lambda: bool(_recording)  # type: ignore[attr-defined]
