"""What PyTorch is in the middle of, and what memory lives. Not documented are

torch._C._current_graph_task_id                                     2.11, 2.13, 2.15
torch._C._functorch.is_batchedtensor, is_legacy_batchedtensor       2.11, 2.13, 2.15
torch._C._functorch.get_unwrapped                                   2.11, 2.13, 2.15
torch._remove_batch_dim, _add_batch_dim                             2.11, 2.13, 2.15
torch.UntypedStorage._weak_ref, _expired, _free_weak_ref            2.11, 2.13, 2.15
torch.Tensor._view_func                                             2.11, 2.13, 2.15
torch._C._are_functorch_transforms_active                           2.11, 2.13, 2.15
torch.autograd.Function, that its base class has `apply` too        2.11, 2.13, 2.15
torch.autograd.graph.Node._set_sequence_nr, of a Function's         2.13, 2.15
torch.autograd.grad_mode._unsafe_preserve_version_counter           2.11, 2.13, 2.15
torch._C._dynamo.eval_frame.get_eval_frame_callback                 2.11, 2.13, 2.15
torch._dynamo.eval_frame.skip_code                                  2.11, 2.13, 2.15
torch._amp_foreach_non_finite_check_and_unscale_                    2.11, 2.13, 2.15
torch._foreach_copy_                                                2.11, 2.13, 2.15
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch.autograd import Function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

F = TypeVar("F", bound=Callable[..., Any])
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
copy_all_ = torch._foreach_copy_


def never_captured(reason: str) -> Callable[[F], F]:
    """As `torch.compiler.disable`, but called at once where Dynamo is not capturing anyway: to put
    its callback away and back takes 3 to 6 microseconds of each call."""

    def decorated(function: F) -> F:
        disabled = torch.compiler.disable(function, reason=reason)

        @functools.wraps(disabled)  # by whose attributes Dynamo knows what not to inline
        def call(*args: Any, **kwargs: Any) -> Any:
            if get_eval_frame_callback() is None:
                return function(*args, **kwargs)
            return disabled(*args, **kwargs)

        made: Any = call
        skip_code(made.__code__)
        return made  # type: ignore[no-any-return]

    return decorated


# Dynamo would capture these in a step of an optimizer that a user compiles, and capture them anew
# at each step, for what they count.
not_compiled = never_captured(reason="amp_graph follows what optimizers do")
around_compiled = torch.compiler.disable(  # what they call may be compiled
    recursive=False, reason="amp_graph follows what optimizers do"
)

_layout, _cdata = attrgetter("layout"), attrgetter("_cdata")
_are_transforms_active: Any = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_weak_ref: Any = torch.UntypedStorage._weak_ref
_expired: Any = torch.UntypedStorage._expired
_free_weak_ref: Any = torch.UntypedStorage._free_weak_ref


def backward_pass() -> int | None:
    """The number of the backward pass that this thread is in."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host waits only if that is where it goes, since what is read
    there is not ordered after the copy."""
    is_there = tensor.device == device
    return tensor if is_there else tensor.to(device, non_blocking=device.type != "cpu")


def any_of(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest of some flags, which may be on several devices, on this one."""
    found, *others = (sent(flag, device) for flag in flags)
    return torch.stack([found, *others]).amax() if others else found


def writes_unseen(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Around writes of the values that are there already."""
    return _unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference()))


def is_captured(device: torch.device) -> bool:
    """Whether what runs on a device is being captured as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_streams(devices: Iterable[torch.device]) -> frozenset[torch.Stream]:
    """The streams of work for these devices that this thread's calls go to; the CPU has none."""
    others = [device for device in devices if device.type != "cpu"]
    accelerator = torch.accelerator.current_accelerator() if others else None
    if accelerator is None:
        return frozenset()
    mine = (device for device in others if device.type == accelerator.type)
    return frozenset(map(torch.accelerator.current_stream, mine))


def has_process_group() -> bool:
    """Whether this process trains together with others, or may."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def runs_when_ready(node: Any) -> None:
    """Have a node of autograd run as soon as its gradients are there, as AccumulateGrad does. The
    youngest of the nodes that are ready runs, so that one made before a graph ran would wait until
    all of its backward pass is over."""
    if torch.__version__ >= "2.13":
        node._set_sequence_nr(2**64 - 1)


def applied(function: type[Function], *args: Any) -> Any:
    """What `function.apply` returns. It looks at each argument for what a transform of torch.func
    left behind, which takes a quarter of a call with many parameters, none of which is such."""
    if _are_transforms_active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


def unbatched(tensor: Tensor) -> Tensor:
    """All of the batch that a tensor inside of torch.vmap, or of the older vmap, stands for."""
    while _is_batched(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return _without_levels(tensor)[0]


def for_all(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What a function makes of each element of a tensor. Of the tensors of the older vmap, that of
    `torch.autograd.grad(is_grads_batched=True)`, it gets the whole batch: what an autograd.Function
    does to one of them is recorded for what stands for the batch, and forgotten with it."""
    whole, levels = _without_levels(tensor)
    result = function(whole)
    for level in range(1, levels + 1):
        result = torch._add_batch_dim(result, levels - level, level)
    return result


def _without_levels(tensor: Tensor) -> tuple[Tensor, int]:
    """All of a batch of the older vmap, whose levels count from 1: the last is the first dimension.
    One that the tensor does not have is a dimension of 1."""
    level = 0
    while _is_legacy_batched(tensor):
        level += 1
        tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return tensor, level


def are_plain(gradients: Sequence[Tensor]) -> bool:
    """Whether fused calls take these: they are dense, none is batched, and none is of a subclass,
    which may know no such calls (DTensor)."""
    return (
        {*map(type, gradients)} <= {Tensor}
        and {*map(_layout, gradients)} <= {torch.strided}
        and not (_are_transforms_active() and any(map(_is_batched, gradients)))
        and not any(map(_is_legacy_batched, gradients))
    )


def view_of(base: Tensor, like: Tensor) -> Tensor:
    """The view of a tensor that `like` is of another one."""
    view: Tensor = like._view_func(base)  # type: ignore[attr-defined]
    return view


def memory(tensor: Tensor) -> int:
    """What tensors have in common that share their memory."""
    if tensor.layout is torch.strided:
        storage: int = tensor.untyped_storage()._cdata
        return storage
    return id(tensor if tensor._base is None else tensor._base)


def memories(tensors: Sequence[Tensor]) -> Iterable[int]:
    """The `memory` of each, in C for tensors that have such."""
    if {*map(_layout, tensors)} <= {torch.strided}:
        return map(_cdata, map(Tensor.untyped_storage, tensors))
    return map(memory, tensors)


class Memories:
    """The memory of some tensors, not kept alive by this.

    As `torch.multiprocessing.reductions.StorageWeakRef` does for one, without an object for each.
    """

    def __init__(self) -> None:
        self._references: list[Any] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        self._references += map(_weak_ref, map(Tensor.untyped_storage, tensors))

    def are_alive(self) -> bool:
        return not any(map(_expired, self._references))

    def __del__(self) -> None:
        for reference in self._references:
            _free_weak_ref(reference)
