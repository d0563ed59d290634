"""The copies of a converted model, and the entries of its `__dict__` that stand in front of the
methods that make them.

A copy has all that is in the model's `__dict__`, the conversion as well, whose graphs read the
parameters of the model itself. So

    nn.DataParallel  gets copies, on each of its GPUs in each call, that run their own code
    copy.deepcopy    gets a copy with a conversion of its own

Private names used here; of PyTorch, seen to work on 2.11, 2.13 and 2.15, and of Python, on 3.11:

    torch.nn.Module._replicate_for_data_parallel
    copy._reconstruct
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol

from torch import nn

from amp_graph.modules import Run, plain_code

SLOT = "_call_impl"  # the method of nn.Module that a conversion stands in front of


class StandIn:
    """Stands in front of a method of a converted model.

    name: of the method, and of the entry in the model's `__dict__`.
    """

    name: str
    module: nn.Module

    def __reduce__(self) -> Any:
        """Pickled or copied without the model, as what stands there in its stead: its method, if it
        has one, once it was loaded, plain; what a copy has in front of that."""
        return getattr, (self.module, self.name, None)


class Converted(Protocol):
    """What stands in the slot of a model."""

    name: str
    module: nn.Module

    def of_copy(self, own_code: Run) -> Run:
        """What runs a copy of the model that has this code."""

    def convert_too(self, copied: nn.Module) -> None:
        """Convert a copy of the model alike."""


class Replicate(StandIn):
    """Makes the copies for `nn.DataParallel`."""

    name = "_replicate_for_data_parallel"

    def __init__(self, conversion: Converted):
        self.module = conversion.module
        self._conversion = conversion

    def __call__(self) -> nn.Module:
        replica: nn.Module = getattr(type(self.module), self.name)(self.module)
        take_out(replica)
        alive = weakref.ref(replica)  # a copy that refers to itself would outlive its call

        def own_code(*args: Any, **kwargs: Any) -> Any:
            called = alive()
            assert called is not None
            return plain_code(called)(*args, **kwargs)

        replica.__dict__[SLOT] = self._conversion.of_copy(own_code)
        return replica


class DeepCopy(StandIn):
    """Makes the copies for `copy.deepcopy`."""

    name = "__deepcopy__"

    def __init__(self, conversion: Converted):
        self.module = conversion.module
        self._conversion = conversion

    def __call__(self, memo: dict[int, Any]) -> Any:
        module, kind = self.module, type(self.module)
        ours = [entry for entry in module.__dict__.values() if isinstance(entry, StandIn)]
        memo.update((id(entry), entry) for entry in ours)  # no copies of these
        own = getattr(kind, self.name, None)
        if own is not None:
            copied = own(module, memo)
        else:
            reduced = kind.__reduce_ex__(module, 4)
            copied = copy._reconstruct(module, memo, *reduced)  # type: ignore[attr-defined]
        if isinstance(copied, nn.Module) and copied is not module:
            if copied.__dict__.get(SLOT) in (None, self._conversion):  # else it is another model's
                take_out(copied)
                self._conversion.convert_too(copied)
        return copied


def put_in(conversion: Converted) -> None:
    """From now on calls of the model and copies of it are made here."""
    entries = (conversion, Replicate(conversion), DeepCopy(conversion))
    conversion.module.__dict__.update((entry.name, entry) for entry in entries)


def take_out(module: nn.Module) -> None:
    """Calls of a model, and copies of it, are made by its own methods again."""
    for name, entry in list(module.__dict__.items()):
        if isinstance(entry, StandIn):
            del module.__dict__[name]
