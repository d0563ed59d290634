"""Leave messages out of graphs that a model gives once: warnings, and cached calls of loggers.

Dynamo ends a graph at `warnings.warn` and at each call of a logger, and leaves a whole frame
uncaptured where that is in a loop. But most warnings are shown once per place, or never
(`torch.nn.Transformer` gives one for masks of two kinds), and a cached method of a logger does
nothing the second time (transformers' `warning_once`). What is said no more often than that is said
when it is captured and left out of the graph. A warning to be shown each time, or raised, and words
that are not known then end the graph as ever.

Private names of PyTorch used here:

    VariableBuilder._id_dispatch, _type_dispatch    what Dynamo makes of objects that a model uses
    SkipFunctionVariable, LoggingLoggerVariable     what it makes of `warnings.warn`, and a logger
    InstructionTranslatorBase.next_instruction      what is done with what a call returns
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import LoggingLoggerVariable

from amp_graph.dynamo_changes.known_values import constants
from amp_graph.dynamo_changes.replaced import found_as, with_entries
from amp_graph.dynamo_changes.warning_filters import FiltersInside

# How often Python shows a warning, by what the filters say: not at all, once, or each time.
NEVER, ONCE, ALWAYS = range(3)
SHOWN = {"ignore": NEVER, "default": ONCE, "module": ONCE, "once": ONCE}


@dataclass(frozen=True)
class Warned:
    """A call of `warnings.warn`, by the features that Python's filters look at."""

    text: str
    category: type[Warning]
    file: str
    line: int
    module: str

    def shown(self, filters: Sequence[Any]) -> int:
        """Return how often the warning is shown, by the first filter that is for it."""
        for action, text, category, module, line in filters:
            is_of_place = _matches(module, self.module) and line in (0, self.line)
            if is_of_place and _matches(text, self.text) and issubclass(self.category, category):
                return SHOWN.get(action, ALWAYS)
        return SHOWN.get(warnings.defaultaction, ALWAYS)  # type: ignore[attr-defined]


def _matches(pattern: Any, text: str) -> bool:
    """Match a filter's pattern as Python does: its own filters have strings, those of users regular
    expressions."""
    return pattern is None or (pattern == text if isinstance(pattern, str) else pattern.match(text))


class SaidOnce:
    """The messages that were left out of the graphs of a model."""

    def __init__(self) -> None:
        self._filters: Sequence[Any] = ()
        self._inside = FiltersInside(())
        self._left_out: dict[Warned, int] = {}
        self._to_say: dict[Hashable, Callable[[], Any]] = {}

    @contextlib.contextmanager
    def around_capture(self) -> Iterator[None]:
        """Say nothing, within; also hide warnings of PyTorch's, such as that a library describes an
        operator's shapes in an old way. One thread at a time may enter."""
        self._filters = [*warnings.filters]
        is_pythons = isinstance(warnings.warn, types.BuiltinFunctionType)  # not put there by a user
        own = {id(warnings.warn): found_as(_Warn, self)} if is_pythons else {}
        own_types = {logging.Logger: found_as(_Logger, self)}
        try:
            with (
                with_entries(VariableBuilder._id_dispatch(), own),
                with_entries(VariableBuilder._type_dispatch(), own_types),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", module=r"torch\.")
                for kind in (DeprecationWarning, FutureWarning):
                    warnings.simplefilter("ignore", kind)
                self._inside = FiltersInside(warnings.filters)
                with self._inside.known():
                    yield
        finally:
            to_say, self._to_say = self._to_say, {}
        for say in to_say.values():
            say()

    def have_changed(self) -> bool:
        """Whether a warning that was left out is to be shown more often now. Asked before each
        call."""
        if not self._left_out or warnings.filters == self._filters:
            return False
        self._filters = [*warnings.filters]
        changed = any(w.shown(self._filters) > shown for w, shown in [*self._left_out.items()])
        if changed:
            self._left_out.clear()
        return changed

    def leaves_out(self, warned: Warned, registry: Any) -> bool:
        """Whether a warning can be left out of the graph. Inside a `warnings.catch_warnings()` of
        the model's it cannot, unless a filter of the model's hides it."""
        if self._inside.are_own:
            return warned.shown(self._inside.own(warnings.filters)) is NEVER
        shown = warned.shown(self._filters)
        if shown is ALWAYS:
            return False
        self._left_out[warned] = shown
        if not registry.get((warned.text, warned.category, warned.line)):
            given = warned.text, warned.category, warned.file, warned.line, warned.module, registry
            self._to_say[warned] = functools.partial(warnings.warn_explicit, *given)
        return True

    def leaves_out_call(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of a logger's method can be left out of the graph."""
        function = getattr(method, "__func__", None)
        if not isinstance(function, functools._lru_cache_wrapper):
            return False
        call = function, method.__self__, *args, *kwargs.items()
        if not _is_hashable(call):
            return False
        self._to_say[call] = functools.partial(method, *args, **kwargs)
        return True


def _is_hashable(call: tuple[Any, ...]) -> bool:
    try:
        hash(call)
    except TypeError:
        return False
    return True


class _Warn(SkipFunctionVariable):
    """`warnings.warn` in a frame that is being captured."""

    def __init__(self, value: Any, said: SaidOnce, **kwargs: Any) -> None:
        super().__init__(value, **kwargs)
        self.said = said

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        given = constants(args, kwargs)
        if given and self._is_left_out(tx, *given[0], **given[1]):
            return ConstantVariable.create(None)
        return super().call_function(tx, args, kwargs)

    def _is_left_out(
        self,
        frame: Any,
        message: Any,
        category: Any = None,
        stacklevel: int = 1,
        source: Any = None,
        **others: Any,
    ) -> bool:
        if not isinstance(message, str) or source is not None or others:
            return False
        while stacklevel > 1 and frame.parent is not None:
            frame, stacklevel = frame.parent, stacklevel - 1
        place, variables = frame.frame_summary(), frame.f_globals
        module = variables.get("__name__", "<string>")
        kind = UserWarning if category is None else category
        warned = Warned(message, kind, place.filename, place.lineno, module)
        return self.said.leaves_out(warned, variables.setdefault("__warningregistry__", {}))


class _Logger(LoggingLoggerVariable):
    """A logger in a frame that is being captured."""

    def __init__(self, value: Any, said: SaidOnce, **kwargs: Any) -> None:
        super().__init__(value, **kwargs)
        self.said = said

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        given = constants(args, kwargs)
        method, is_used = getattr(self.value, name, None), tx.next_instruction.opname != "POP_TOP"
        if given and not is_used and self.said.leaves_out_call(method, *given):
            return ConstantVariable.create(None)
        return super().call_method(tx, name, args, kwargs)
