"""PyTorch's autograd engine: the state that it is in, and fused calls.

Private names of PyTorch used here:

    torch._C._current_graph_task_id                             which backward pass runs
    torch._C._will_engine_execute_node                          and whether it comes to a node
    torch._C._autograd._get_current_graph_task_keep_graph       and whether another may follow
    torch.autograd.grad_mode._unsafe_preserve_version_counter   has writes not be counted
    torch.autograd.graph.Node._set_sequence_nr                  (from 2.13) when a node runs
    ..., ._register_hook_dict, torch.Tensor._backward_hooks     as Tensor.register_hook uses them
    torch._amp_foreach_non_finite_check_and_unscale_, _foreach_copy_, _foreach_add_
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
copy_all_ = torch._foreach_copy_
add_all_ = torch._foreach_add_


# The number of the backward pass that this thread is in, or OUTSIDE.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
OUTSIDE = -1
# Whether its graph is kept for another one (`retain_graph`).
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class Probe:
    """A piece of autograd that is part of a graph for nothing but to ask about backward passes."""

    @torch.inference_mode(False)
    @torch.enable_grad()
    def __init__(self) -> None:
        self.tensor = torch.zeros((), device="cpu", requires_grad=True).view(())
        self._node: Any = self.tensor.grad_fn

    def sees_a_selection(self) -> bool:
        """Whether the pass that runs computes gradients of some tensors that were asked for
        (`torch.autograd.grad`), not of all leaves. The probe has to be in its graph."""
        return not torch._C._will_engine_execute_node(self._node)


class _Carrier(threading.local):
    """A tensor for each thread that hooks come from."""

    @torch.inference_mode(False)
    def __init__(self) -> None:
        self.tensor = torch.zeros((), device="cpu")


_carrier = _Carrier()


def call_before(node: Any, hook: Callable[[Any], None]) -> None:
    """Have a node of autograd call a hook before it runs, as `node.register_prehook` does. That
    would count up PyTorch's number of hooks, and models would look for new ones of theirs
    (`capture/hooks`)."""
    carrier: Any = _carrier.tensor
    carrier._backward_hooks = {0: hook}
    node._register_hook_dict(carrier)
    carrier._backward_hooks = None


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. The host waits only if that is where it goes, since what is
    read there is not ordered after the copy."""
    is_there = tensor.device == device
    return tensor if is_there else tensor.to(device, non_blocking=device.type != "cpu")


def any_of(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest of some flags, which may be on several devices, on this one."""
    if len(flags) == 1:
        return sent(flags[0], device)
    return torch.stack([sent(flag, device) for flag in flags]).amax()


def writes_unseen(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Leave versions alone, within, for writes of the values that are there already."""
    if any(map(Tensor.is_inference, tensors)):  # these count none
        tensors = [t for t in tensors if not t.is_inference()]
    return _unsafe_preserve_version_counter((*tensors,))


def look_at_(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Set a flag if there is an infinity or NaN among gradients, on the same device, by the call
    that unscales, times 1. Autograd may have saved the gradients, and one may be a single number
    expanded, which nobody writes to."""
    given = [*gradients]
    if 0 in chain.from_iterable(map(Tensor.stride, given)):
        given = [g.contiguous() if 0 in g.stride() else g for g in given]
    with writes_unseen(given):
        check_and_unscale_(given, flag, torch.ones_like(flag))


def is_captured(device: torch.device) -> bool:
    """Whether work on a device is being captured as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_streams(devices: Iterable[torch.device]) -> frozenset[torch.Stream]:
    """Return the streams that this thread's work for these devices goes to; the CPU has none."""
    others = [device for device in devices if device.type != "cpu"]
    accelerator = torch.accelerator.current_accelerator() if others else None
    if accelerator is None:
        return frozenset()
    mine = (device for device in others if device.type == accelerator.type)
    return frozenset(map(torch.accelerator.current_stream, mine))


_is_distributed = torch.distributed.is_available()


def has_process_group() -> bool:
    """Whether this process trains together with others, or may."""
    return _is_distributed and torch.distributed.is_initialized()


CAN_RUN_WHEN_READY = torch.__version__ >= "2.13"


def runs_when_ready(node: Any) -> None:
    """Have a node of autograd run as soon as its gradients are there, as AccumulateGrad does. The
    youngest of the nodes that are ready runs, so one made before a graph ran would wait until all
    of its backward pass is over."""
    if CAN_RUN_WHEN_READY:
        node._set_sequence_nr(2**64 - 1)
