"""Snapshots of the state that a call of a model changes on the side, and their restoration.

Private name of PyTorch used here:

    LazyModuleMixin._initialize_hook    which a lazy module has until it is called
"""

from __future__ import annotations

import contextlib
import copy
import operator
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
HOOKS = [name for name in OF_MODULES if "_hooks" in name]  # what a module keeps them in
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


class RandomSnapshot:
    """The state of random numbers, as it is now: PyTorch's, Python's, and NumPy's if it is
    imported."""

    def __init__(self) -> None:
        self._pythons = random.getstate()
        self._numpy: Any = sys.modules.get("numpy")
        self._numpys = self._numpy and self._numpy.random.get_state()
        self._on_cpu = torch.get_rng_state()
        device = torch.accelerator.current_accelerator()
        others: Any = torch.get_device_module(device) if device else None
        many = "_all" if hasattr(others, "get_rng_state_all") else ""  # of MPS there is one device
        is_used = others is not None and getattr(others, "is_initialized", lambda: True)()
        self._on_others = getattr(others, f"get_rng_state{many}")() if is_used else None
        self._set_others = getattr(others, f"set_rng_state{many}", None)

    def restore(self) -> None:
        random.setstate(self._pythons)
        if self._numpys:
            self._numpy.random.set_state(self._numpys)
        torch.set_rng_state(self._on_cpu)
        if self._on_others is not None and self._set_others is not None:
            self._set_others(self._on_others)


class TensorSnapshot:
    """The values of tensors at one moment.

    Only tensors that have changed are written back, and that does not count as a write, except to a
    parameter: a graph of the caller's may need them at their present version. Kernels of batch norm
    do not count their writes either. Tensors that cannot be read or written are left alone. For
    tensors that cannot be compared (nested, sparse, a subclass) the version tells whether they have
    changed.
    """

    def __init__(self, tensors: Iterable[Any]):
        held = filter(_can_be_kept, tensors)
        self._values = [(t, t.detach().clone(), version_of(t)) for t in held]

    def restore(self) -> None:
        for tensor, value, version in self._values:
            if not _holds(tensor, value, version):
                # To leave inference mode turns recording on.
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    if _is_alike(tensor, value):
                        _uncounted(tensor).copy_(value)
                    else:
                        tensor.data = value.clone()  # in inference mode, if it was made in it


class ContainerSnapshot:
    """The contents of lists, dictionaries and sets at one moment, not of those inside them. A
    container is put back if it holds other objects by then."""

    def __init__(self, containers: Iterable[Any]):
        self._held = [(held, copy.copy(held)) for held in containers if type(held) in CONTAINERS]

    def restore(self) -> None:
        for held, before in self._held:
            if not _has_the_same(held, before):
                held.clear()
                (held.update if isinstance(held, (dict, set)) else held.extend)(before)


class ModelSnapshot:
    """The state of a model that a call changes on the side, at one moment.

    Buffers, attributes such as a count of steps, the contents of lists and dictionaries that are
    attributes, hooks of its modules, random state and, if asked for, parameters (averages of
    others, say). Not the contents of objects that are attributes.
    """

    def __init__(self, model: nn.Module, parameters: bool = False):
        of_modules: list[Any] = [m._buffers for m in model.modules()]
        # The first call of a lazy module completes it, and takes its hook for that away.
        complete = [m for m in model.modules() if not (is_incomplete(m) or _is_lazy(m))]
        of_modules += [vars(m) for m in complete]
        # With a mark beside them, as transformers has, hooks that stayed would be added once more.
        of_modules += [vars(m)[name] for m in complete for name in HOOKS if name in vars(m)]
        # A TorchScript module's are held by an object that only looks like a dictionary.
        self._held = [(held, dict(held)) for held in of_modules if isinstance(held, dict)]
        values = [value for held in of_modules for value in held.values()]
        self._tensors = TensorSnapshot([*values, *(model.parameters() if parameters else ())])
        self._containers = ContainerSnapshot(
            v for m in model.modules() for name, v in [*vars(m).items()] if name not in OF_MODULES
        )
        self._parts = [*model.modules()], [*model.parameters()]
        self._model, self._random = model, RandomSnapshot()

    def has_other_attributes(self) -> bool:
        """Whether an attribute of a module is another object than it was."""
        return self._differs(apart_from=())

    def was_set_up(self) -> bool:
        """Whether the model has other parts or parameters than it had, or other attributes, apart
        from counts of calls and other numbers."""
        now = [*self._model.modules()], [*self._model.parameters()]
        if [[*map(id, each)] for each in now] != [[*map(id, each)] for each in self._parts]:
            return True
        return self._differs(apart_from=(int, float))

    def _differs(self, apart_from: tuple[type, ...]) -> bool:
        return any(
            held.keys() != before.keys()
            or any(held[n] is not before[n] and type(held[n]) not in apart_from for n in before)
            for held, before in self._held
        )

    def restore(self) -> None:
        self._tensors.restore()
        for held, before in self._held:
            for name in held.keys() - before.keys():
                del held[name]
            held.update(before)
        self._containers.restore()
        self._random.restore()


def _has_the_same(held: Any, before: Any) -> bool:
    """Whether two containers of one type hold the same objects in the same order."""
    if isinstance(held, set):
        return bool(held == before)
    pairs = [(held, before)]
    if isinstance(held, dict):
        pairs.append((held.values(), before.values()))
    return len(held) == len(before) and all(all(map(operator.is_, *pair)) for pair in pairs)


def _can_be_kept(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return False
    return not (_is_dense(value) and (_is_freed(value) or _is_expanded(value)))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; None in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _is_alike(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    if tensor.is_nested:  # which may have no shape
        return tensor.dtype == value.dtype
    return (tensor.shape, tensor.dtype) == (value.shape, value.dtype)


def _holds(tensor: torch.Tensor, value: torch.Tensor, version: int | None) -> bool:
    """Whether a tensor still holds a value, with NaN where it had NaN."""
    if not _is_dense(tensor) or type(tensor) not in (torch.Tensor, nn.Parameter):
        return version is not None and version == version_of(tensor)
    if not _is_alike(tensor, value):
        return False
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return torch.equal(tensor, value) or (
        has_nan and torch.allclose(tensor, value, rtol=0, atol=0, equal_nan=True)
    )


def _uncounted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a buffer by another name, whose writes its version does not count. Those to parameters
    count: their low-precision copies are kept by version."""
    is_counted = isinstance(tensor, nn.Parameter) or not _is_dense(tensor)
    return tensor if is_counted else tensor.data


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was given back, as that of a gathered parameter between two uses
    (FSDP). Reading it would end the process (torch 2.13)."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, so that it cannot be written to."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def is_incomplete(module: nn.Module) -> bool:
    """Whether a module's next call completes it: it is lazy, though it may have its parameters by
    now."""
    return isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook")


def _is_lazy(module: nn.Module) -> bool:
    return any(p is not None and is_lazy(p) for p in module._parameters.values())


@contextlib.contextmanager
def unchanged(model: nn.Module, parameters: bool = False) -> Iterator[None]:
    """Put the model's state back on exit: buffers, attributes and random state, as `ModelSnapshot`
    explains."""
    before = ModelSnapshot(model, parameters)
    try:
        yield
    finally:
        before.restore()
