"""The copies of a converted model, and the entries of its `__dict__` that stand in front of the
methods that make them.

A copy has all that is in the model's `__dict__`, the conversion as well, whose graphs read the
parameters of the model itself. So

    nn.DataParallel    gets copies, on each of its GPUs in each call, that run their own code
    copy.deepcopy      gets a copy with a conversion of its own
    pickle, copy.copy  get the plain model, which loads also where this package is not installed

Private names used here; of PyTorch, seen to work on 2.11, 2.13 and 2.15, and of Python, on 3.11
and 3.14:

    torch.nn.Module._replicate_for_data_parallel
    copy._reconstruct
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from amp_graph.errors import AmpGraphError
from amp_graph.modules import CALL, Run, plain_code


def converted_parts(model: nn.Module) -> list[nn.Module]:
    """The modules in a model, itself apart, that are converted by themselves."""
    return [part for part in model.modules() if part is not model and CALL in part.__dict__]


class StandIn:
    """Stands in front of a method of a converted model, which is not kept alive by it: nothing that
    a model's `__dict__` holds may, or only Python's collector would free the model.

    name: of the method, and of the entry in the model's `__dict__`.
    """

    name: str

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        self.kept: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise AmpGraphError(
                f"the converted model is gone: keep it beside its '{self.name}', which does not, "
                f"or convert what has its __dict__ now"
            )
        return module

    def __reduce__(self) -> Any:
        """Pickled or copied where `Reduce` did not leave it out, without the model, say, it is what
        stands there in its stead: in a loaded model the method; in a copy what the copy has."""
        return getattr, (self.module, self.name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self.module, memo)
        entry = getattr(copied, self.name, None)
        if isinstance(entry, StandIn):
            entry.kept = copied  # nobody else has it, if only a model's `__dict__` is copied
        return entry


class Converted(Protocol):
    """What stands in front of a model's call."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    def stand_ins(self) -> Iterable[StandIn]:
        """Itself, and those in front of other methods."""

    def of_copy(self, own_code: Run) -> Run:
        """What runs a copy of the model that has this code."""

    def convert_too(self, copied: nn.Module) -> None:
        """Convert a copy of the model alike."""


def _converted(module: nn.Module) -> Converted:
    converted: Converted = module.__dict__[CALL]
    return converted


class Replicate(StandIn):
    """Makes the copies for `nn.DataParallel`."""

    name = "_replicate_for_data_parallel"

    def __call__(self) -> nn.Module:
        replica: nn.Module = getattr(type(self.module), self.name)(self.module)
        take_out(replica)
        replica.__dict__[CALL] = _converted(self.module).of_copy(plain_code(replica))
        return replica


class DeepCopy(StandIn):
    """Makes the copies for `copy.deepcopy`."""

    name = "__deepcopy__"

    @property
    def __func__(self) -> Any:
        """As a bound method has it, for those who bind it to their copy."""
        return getattr(type(self.module), self.name)

    def __call__(self, memo: dict[int, Any]) -> Any:
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
        return _plain(type(self.module).__reduce_ex__(self.module, protocol))


def _plain(state: Any, levels: int = 5) -> Any:
    """What a class has pickled, with nothing of ours in the `__dict__` that is there somewhere. All
    else is the same objects as before, since `copy.copy` shares them."""
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
    """From now on calls of the model and copies of it are made here."""
    module = conversion.module
    entries = (*conversion.stand_ins(), Replicate(module), DeepCopy(module), Reduce(module))
    module.__dict__.update((entry.name, entry) for entry in entries)


def take_out(module: nn.Module) -> None:
    """Calls of a model, and copies of it, are made by its own methods again."""
    for name, entry in list(module.__dict__.items()):
        if isinstance(entry, StandIn):
            del module.__dict__[name]
