"""The copies of a converted model, and the entries of its `__dict__` that stand in front of the
methods that make them.

A copy has all that is in the model's `__dict__`, the conversion as well, whose graphs read the
parameters of the model itself. So

    nn.DataParallel    gets copies, on each of its GPUs in each call, that run their own code
    copy.deepcopy      gets a copy with a conversion of its own
    pickle, copy.copy  get the plain model, which loads also where this package is not installed
    __dict__           an object that is given it, with all that is in it, is the plain model, too:
                       what stands there for another one is taken out when the object is called

Private names used here, of PyTorch and of Python, where they were seen to work on 3.11 and 3.14:

    torch.nn.Module._replicate_for_data_parallel, _wrapped_call_impl
    copy._reconstruct
    what OBJECTS are called
"""

from __future__ import annotations

import copy
import operator
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, Protocol

from torch import nn

from amp_graph.errors import AmpGraphError
from amp_graph.modules import CALL, Run, plain_code

# By function that calls a method of a module, which may be stood in for: its name for the module.
OBJECTS = {
    "_wrapped_call_impl": "self",
    "deepcopy": "x",
    "copy": "x",
    "save": "obj",  # of pickle in Python
    "replicate": "module",
}


def converted_parts(model: nn.Module) -> list[nn.Module]:
    """The modules in a model, itself apart, that are converted by themselves."""
    parts = (part for part in model.modules() if part is not model)
    return [part for part in parts if CALL in part.__dict__ and not is_copy(part)]


def is_copy(module: nn.Module) -> bool:
    """Whether a module was given the `__dict__` of a converted model, and is not converted
    itself."""
    entry = module.__dict__.get(CALL)
    return isinstance(entry, StandIn) and not entry.is_for(module)


def take_out_of_copy(module: nn.Module) -> None:
    """Take stand-ins out of a module that are for another one, so that it runs its own code."""
    for name, entry in list(module.__dict__.items()):
        if isinstance(entry, StandIn) and not entry.is_for(module):
            del module.__dict__[name]


class StandIn:
    """A stand-in for a method of a converted model. It does not keep the model alive: if anything
    in a model's `__dict__` did, only Python's garbage collector would free the model.

    name: the method's, and that of the entry in the model's `__dict__`.
    """

    name: str

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        self.copied: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise AmpGraphError(
                f"the converted model is gone: keep it beside its '{self.name}', which does not, "
                f"or convert what has its __dict__ now"
            )
        return module

    def is_for(self, module: nn.Module) -> bool:
        return self._module() is module

    def leave_copy(self, module: nn.Module) -> None:
        """`take_out_of_copy`, for Dynamo, which captures a call of such a module."""
        take_out_of_copy(module)

    def called_copy(self, caller: FrameType) -> nn.Module | None:
        """The module whose method is called in a frame, if it is not the one that this stands in
        for, but was given its `__dict__`. From now on it has methods of its own."""
        name = OBJECTS.get(caller.f_code.co_name)
        called = None if name is None else caller.f_locals.get(name)
        if called is None or called is self._module():
            return None
        if not isinstance(called, nn.Module) or called.__dict__.get(self.name) is not self:
            return None
        take_out_of_copy(called)
        return called

    def __reduce__(self) -> Any:
        """Pickled or copied where `Reduce` did not leave it out, without the model, say, it is what
        stands there in its stead: in a loaded model the method; in a copy what the copy has."""
        return getattr, (self.module, self.name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self.module, memo)
        entry = getattr(copied, self.name, None)
        if isinstance(entry, StandIn):
            entry.copied = copied  # nobody else has it, if only a model's `__dict__` is copied
        return entry


class Converted(Protocol):
    """The stand-in for a model's call."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    def stand_ins(self) -> Iterable[StandIn]:
        """Return itself, and the stand-ins for other methods."""

    def of_copy(self, plain: Run) -> Run:
        """Return a function that runs a copy of the model that has this code."""

    def convert_too(self, copied: nn.Module) -> None:
        """Convert a copy of the model alike."""


def _converted(module: nn.Module) -> Converted:
    converted: Converted = module.__dict__[CALL]
    return converted


class Replicate(StandIn):
    """Makes the copies for `nn.DataParallel`."""

    name = "_replicate_for_data_parallel"

    def __call__(self) -> nn.Module:
        if (copied := self.called_copy(sys._getframe(1))) is not None:
            return copied._replicate_for_data_parallel()  # type: ignore[no-any-return]
        replica: nn.Module = getattr(type(self.module), self.name)(self.module)
        take_out(replica)
        replica.__dict__[CALL] = _converted(self.module).of_copy(plain_code(replica))
        return replica


class DeepCopy(StandIn):
    """Makes the copies for `copy.deepcopy`."""

    name = "__deepcopy__"

    @property
    def __func__(self) -> Any:
        """The function, as of a bound method, for code that binds it to a copy of its own."""
        return getattr(type(self.module), self.name)

    def __call__(self, memo: dict[int, Any]) -> Any:
        if (other := self.called_copy(sys._getframe(1))) is not None:
            return copy.deepcopy(other, memo)
        module, kind = self.module, type(self.module)
        entries = [entry for entry in module.__dict__.values() if isinstance(entry, StandIn)]
        memo.update((id(entry), entry) for entry in entries)  # no copies of these
        own = getattr(kind, self.name, None)
        if own is not None:
            copied = own(module, memo)
        else:
            reduced = kind.__reduce_ex__(module, 4)
            copied = copy._reconstruct(module, memo, *reduced)  # type: ignore[attr-defined]
        if isinstance(copied, nn.Module) and copied is not module:
            ours = _converted(module)
            if copied.__dict__.get(CALL) in (None, ours):  # else it is another model's
                take_out(copied)
                ours.convert_too(copied)
        return copied


class Reduce(StandIn):
    """Says what is pickled of a model, and what `copy.copy` copies: `pickle` and `copy` ask the
    instance for this method, and not its class (Python 3.11, in C as well)."""

    name = "__reduce_ex__"

    def __call__(self, protocol: int) -> Any:
        if (copied := self.called_copy(sys._getframe(1))) is not None:
            return copied.__reduce_ex__(protocol)
        return _plain(type(self.module).__reduce_ex__(self.module, protocol))


def _plain(state: Any, levels: int = 5) -> Any:
    """Return what a class has pickled without stand-ins in the `__dict__` that is somewhere in it.
    All else are the same objects as before, since `copy.copy` shares them."""
    if levels == 0 or type(state) not in (tuple, list, dict):
        return state
    if type(state) is dict:
        plain: Any = {k: v for k, v in state.items() if not isinstance(v, StandIn)}
        if len(plain) < len(state):
            return plain
        plain = {k: _plain(v, levels - 1) for k, v in state.items()}
        is_same = all(plain[k] is v for k, v in state.items())
    else:
        plain = type(state)(_plain(v, levels - 1) for v in state)
        is_same = all(map(operator.is_, plain, state))
    return state if is_same else plain


def put_in(conversion: Converted) -> None:
    """Put stand-ins into a model, so that its calls and its copies are made here from now on."""
    module = conversion.module
    entries = (*conversion.stand_ins(), Replicate(module), DeepCopy(module), Reduce(module))
    module.__dict__.update((entry.name, entry) for entry in entries)


def take_out(module: nn.Module) -> None:
    """Take the stand-ins out of a model, so that its own methods serve its calls and copies
    again."""
    for name, entry in list(module.__dict__.items()):
        if isinstance(entry, StandIn):
            del module.__dict__[name]
