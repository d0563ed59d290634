"""A model that filters warnings for a while does not end its graph.

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return self.lstm(x)                 fastai's AWD-LSTM

Dynamo enters `catch_warnings` while it captures, and ends the graph at the filter, in a block that
it cannot take up again: nothing of that function is captured then. Here the filter is set while it
is captured, and left out of the graph; code behind a break in the block runs under the filters that
the block had there. Operators in a graph warn as they would outside of the block. A filter that
raises what it finds, and a block that keeps it, are left to Dynamo.

Private names of PyTorch used here:

    VariableBuilder._id_dispatch, _type_dispatch    what Dynamo makes of what a model uses
    SkipFunctionVariable            what it makes of these
    CatchWarningsCtxManagerVariable.enter, reconstruct_type, catch_warnings_args
    OutputGraph.install_global, GlobalSource    a name for what code behind a break needs
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import CatchWarningsCtxManagerVariable

from amp_graph.dynamo_changes.known_values import constants
from amp_graph.dynamo_changes.replaced import found_as, with_entries
from amp_graph.patching import method_inside

SETTERS = (warnings.simplefilter, warnings.filterwarnings)


class FiltersInside:
    """The filters in force while a model is captured. `outside`: the list of those that are not the
    model's own."""

    def __init__(self, outside: Sequence[Any]) -> None:
        self.outside = outside
        self._blocks: list[tuple[Any, Sequence[Any]]] = []  # what was entered, with its list
        self._is_lost = False

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Have Dynamo go on, within, where a block is given a filter."""
        setters = {id(setter): found_as(_Setter, self) for setter in SETTERS}
        entered = {_Again: found_as(_AgainEntered)}
        with (
            with_entries(VariableBuilder._id_dispatch(), setters),
            with_entries(VariableBuilder._type_dispatch(), entered),
            method_inside(CatchWarningsCtxManagerVariable, "enter", self._enter),
            method_inside(CatchWarningsCtxManagerVariable, "reconstruct_type", self._reconstruct),
        ):
            yield

    @property
    def are_own(self) -> bool:
        """Whether what is captured now is in a block of the model's."""
        return warnings.filters is not self.outside

    def own(self, filters: Sequence[Any]) -> list[Any]:
        """Return the filters of a list that are the model's own. They may equal others."""
        outside = {*map(id, self.outside)}
        return [f for f in filters if id(f) not in outside]

    def set(self, setter: Any, given: tuple[list[Any], dict[str, Any]] | None) -> bool:
        """Whether the call of a setter can be left out of the graph."""
        if given is None or not self.are_own or "error" in (*given[0], *given[1].values()):
            self._is_lost = True
            return False
        setter(*given[0], **given[1])
        return True

    def _enter(self, method: Any, block: Any, frame: Any) -> Any:
        entered = method(block, frame)
        self._blocks.append((block, warnings.filters))
        return entered

    def _reconstruct(self, method: Any, block: Any, codegen: Any) -> None:
        """Write what code behind a break enters in place of a block."""
        args = {k: value.as_python_constant() for k, value in block.catch_warnings_args.items()}
        lists = [filters for entered, filters in self._blocks if entered is block]
        if self._is_lost or "record" in args or not lists:
            method(block, codegen)
            return
        again = _Again(args, self.own(lists[-1]))
        codegen(GlobalSource(codegen.tx.output.install_global("catch_warnings", again)))


@dataclass(frozen=True, eq=False)
class _Again:
    """Enters a block with the filters that it had. Called by code that Dynamo writes."""

    args: dict[str, Any]
    filters: Sequence[Any]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with warnings.catch_warnings(**self.args):
            set_first(self.filters)
            with warnings.catch_warnings():  # until then Python looks at none of them
                yield


def set_first(filters: Sequence[Any]) -> None:
    warnings.filters[:0] = filters  # type: ignore[index]


class _Setter(SkipFunctionVariable):
    """The variable for `warnings.simplefilter`, or the like, in a frame that is being captured."""

    def __init__(self, value: Any, filters: FiltersInside, **kwargs: Any) -> None:
        super().__init__(value, **kwargs)
        self.filters = filters

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        if self.filters.set(self.value, constants(args, kwargs)):
            return ConstantVariable.create(None)
        return super().call_function(tx, args, kwargs)


class _AgainEntered(SkipFunctionVariable):
    """A block behind a break in it."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        given = {name: ConstantVariable.create(value) for name, value in self.value.args.items()}
        return _Block(given, self.value.filters)


class _Block(CatchWarningsCtxManagerVariable):
    def __init__(self, args: dict[str, VariableTracker], filters: Sequence[Any]) -> None:
        super().__init__(args)
        self.filters = filters

    def enter(self, tx: Any) -> VariableTracker:
        entered = super().enter(tx)
        set_first(self.filters)
        return entered
