"""Warnings of a model's own, as `torch.nn.Transformer` gives them for masks of two kinds.

Dynamo ends a graph at `warnings.warn`, and leaves a whole frame uncaptured where that is in a loop.
Most warnings are shown once per place, or never. Such a one is given when it is captured and does
nothing in the graph, for as long as it is shown no more often than that. One to be shown each time,
or to be raised, or whose text is not known then, ends the graph as ever.

Private names of PyTorch used here; all were seen to work on 2.11, 2.13 and 2.15:

    VariableBuilder._id_dispatch    what Dynamo makes of an object that a model calls
    SkipFunctionVariable            what it makes of `warnings.warn`
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder

# How often Python shows a warning, by what the filters say: not at all, once, or each time.
NEVER, ONCE, ALWAYS = range(3)
SHOWN = {"ignore": NEVER, "default": ONCE, "module": ONCE, "once": ONCE}


@dataclass(frozen=True)
class Given:
    """A call of `warnings.warn`, by what Python's filters look at."""

    text: str
    category: type[Warning]
    file: str
    line: int
    module: str

    def shown(self, filters: Sequence[Any]) -> int:
        """How often, by the first of the filters that is for it."""
        for action, text, category, module, line in filters:
            is_of_place = _matches(module, self.module) and line in (0, self.line)
            if is_of_place and _matches(text, self.text) and issubclass(self.category, category):
                return SHOWN.get(action, ALWAYS)
        return SHOWN.get(warnings.defaultaction, ALWAYS)  # type: ignore[attr-defined]


def _matches(pattern: Any, text: str) -> bool:
    """As Python does: its own filters have strings, those of users regular expressions."""
    return pattern is None or (pattern == text if isinstance(pattern, str) else pattern.match(text))


class OwnWarnings:
    """What was left out of the graphs of a model."""

    def __init__(self) -> None:
        self._filters: Sequence[Any] = ()
        self._inside: Sequence[Any] = ()
        self._left_out: dict[Given, int] = {}
        self._to_give: dict[Given, Any] = {}

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Around a capture, in which warnings of PyTorch are not shown. To be entered by one thread
        at a time."""
        self._filters = [*warnings.filters]
        known = VariableBuilder._id_dispatch()
        before = known.get(id(warnings.warn))
        known[id(warnings.warn)] = self._found
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\.")
                self._inside = warnings.filters
                yield
        finally:
            if before is None:
                del known[id(warnings.warn)]
            else:
                known[id(warnings.warn)] = before
            to_give, self._to_give = self._to_give, {}
        for w, registry in to_give.items():
            warnings.warn_explicit(w.text, w.category, w.file, w.line, w.module, registry)

    def have_changed(self) -> bool:
        """Whether one that was left out is to be shown more often now. Asked before each call."""
        if not self._left_out or warnings.filters == self._filters:
            return False
        self._filters = [*warnings.filters]
        changed = any(w.shown(self._filters) > shown for w, shown in [*self._left_out.items()])
        if changed:
            self._left_out.clear()
        return changed

    def leave_out(self, warning: Given, registry: Any) -> bool:
        """Whether a call need not be in the graph. In a `warnings.catch_warnings()` of the model's,
        which Dynamo enters, it has to be."""
        shown = warning.shown(self._filters)
        if shown is ALWAYS or warnings.filters is not self._inside:
            return False
        self._left_out[warning] = shown
        was_given = registry.get((warning.text, warning.category, warning.line))
        if not was_given:
            self._to_give[warning] = registry
        return True

    def _found(self, builder: VariableBuilder, function: Any) -> VariableTracker:
        builder.install_guards(GuardBuilder.ID_MATCH)
        return _Warn(function, self, source=builder.source)


class _Warn(SkipFunctionVariable):
    """`warnings.warn` in a frame that is being captured."""

    def __init__(self, function: Any, own: OwnWarnings, **kwargs: Any) -> None:
        super().__init__(function, **kwargs)
        self.own = own

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        values = [*args, *kwargs.values()]
        if all(value.is_python_constant() for value in values):
            given = [value.as_python_constant() for value in args]
            named = {name: value.as_python_constant() for name, value in kwargs.items()}
            if self._is_left_out(tx, *given, **named):
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
        warning = Given(message, kind, place.filename, place.lineno, module)
        return self.own.leave_out(warning, variables.setdefault("__warningregistry__", {}))
