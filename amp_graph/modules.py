"""What is asked of a user's module besides its graphs: its plain call, its devices, its state."""

from __future__ import annotations

import contextlib
import dis
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

Run = Callable[..., Any]
T = TypeVar("T")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of PyTorch's data-parallel wrappers."""
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    return model


def path_by_id(model: nn.Module) -> dict[str, str]:
    """The path of each module in a model by its id, as `retrace` wants them."""
    return {str(id(module)): path for path, module in model.named_modules()}


def forward_of(module: nn.Module) -> tuple[Any, Any]:
    """What Dynamo does not guard of the code that a call of the module runs: its class, and the
    `forward` of that as it stands there (a `functools.partialmethod` is another at each access)."""
    kind = type(module)
    for base in kind.__mro__:
        if "forward" in base.__dict__:
            return kind, base.__dict__["forward"]
    return kind, None


def is_rerouted(module: nn.Module) -> bool:
    """Whether the next call of a model, or of a wrapper of PyTorch's around it, runs something
    else: a function that stands in the place of its `forward` for one call, and puts another there
    as it begins. So Lightning runs `training_step`, which calls the model, inside of a wrapper."""
    forward = unwrapped(module).__dict__.get("forward")
    return isinstance(forward, FunctionType) and _sets_forward(forward.__code__)


@lru_cache
def _sets_forward(code: CodeType) -> bool:
    instructions = dis.get_instructions(code)
    return any(i.opname == "STORE_ATTR" and i.argval == "forward" for i in instructions)


def devices_of(module: nn.Module) -> frozenset[str]:
    """The types of the devices that a model's parameters are on."""
    return frozenset(p.device.type for p in module.parameters())


def autocast_devices() -> tuple[str, ...]:
    """The kinds of device that code may run under autocast on; one is PyTorch's accelerator, if it
    is registered by a package of its own."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu", "cuda", "mps", "xpu", *([accelerator.type] if accelerator else ()))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether code of the user's is given gradients of what a module, or one in it, computes."""
    return any(m._backward_hooks or m._backward_pre_hooks for m in module.modules())


def plain_code(module: nn.Module) -> Run:
    """What `module(...)` ran before conversion. It does not keep the module alive."""
    call_impl: Run = type(module)._call_impl
    reference = weakref.ref(module)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return call_impl(reference(), *args, **kwargs)

    return plain


def alive(reference: Callable[[], T | None]) -> T:
    """What a weak reference is to, which is not gone while it is called."""
    found = reference()
    assert found is not None, "a call of what is gone"
    return found


def weak_method(method: Run) -> Run:
    """The method, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        return alive(reference)(*args, **kwargs)

    return call


def call_with(call: Run, batch: Any) -> Any:
    """Call on a batch."""
    args, kwargs = arguments_of(batch)
    return call(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch is a tensor, a sequence of positional or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return (), {**batch}
    return ((batch,) if isinstance(batch, torch.Tensor) else (*batch,)), {}


class KeptRandomState:
    """The state of PyTorch's random numbers, as it is now."""

    def __init__(self) -> None:
        self._on_cpu = torch.get_rng_state()
        device = torch.accelerator.current_accelerator()
        others: Any = torch.get_device_module(device) if device else None
        is_used = hasattr(others, "get_rng_state_all") and others.is_initialized()
        self._on_others = others.get_rng_state_all() if is_used else []
        self._others = others

    def put_back(self) -> None:
        torch.set_rng_state(self._on_cpu)
        if self._on_others:
            self._others.set_rng_state_all(self._on_others)


class Kept:
    """What calls of a model change by the way, as it is now: buffers, attributes such as a count of
    steps, random state and, if asked for, parameters (averages of others, say). Not what is in a
    list or object that is an attribute."""

    def __init__(self, model: nn.Module, parameters: bool = False):
        of_modules: list[Any] = [m._buffers for m in model.modules()]
        of_modules += [
            vars(m) for m in model.modules() if not _is_lazy(m)
        ]  # its first call completes
        # Those of a TorchScript module are held by what only looks like one.
        self._held = [(held, dict(held)) for held in of_modules if isinstance(held, dict)]
        self._values = _copies(tensor for held in of_modules for tensor in held.values())
        dense = (p for p in model.parameters() if p.layout is torch.strided and not p.is_meta)
        self._parameters = _copies(dense if parameters else ())
        self._random = KeptRandomState()

    def put_back(self) -> None:
        # A graph of the caller's may still need the others as they are.
        written = ((p, value) for p, value in self._parameters if not torch.equal(p, value))
        for tensor, value in (*self._values, *written):
            # To leave inference mode turns recording on.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
        for held, kept in self._held:
            for name in held.keys() - kept.keys():
                del held[name]
            held.update(kept)
        self._random.put_back()


def _copies(values: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors that can be written to, and what is in them now."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    held = (t for t in tensors if not is_lazy(t) and not _is_freed(t) and not _is_expanded(t))
    return [(t, t.detach().clone()) for t in held]


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether its memory was given back, as that of a gathered parameter between two uses (FSDP).
    To read it would end the process (torch 2.13)."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that it cannot be written to."""
    if tensor.layout is not torch.strided:
        return False
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _is_lazy(module: nn.Module) -> bool:
    return any(p is not None and is_lazy(p) for p in module._parameters.values())


@contextlib.contextmanager
def unchanged(model: nn.Module, parameters: bool = True) -> Iterator[None]:
    """Parameters, buffers, attributes and random state are put back, as `Kept` explains."""
    kept = Kept(model, parameters)
    try:
        yield
    finally:
        kept.put_back()
