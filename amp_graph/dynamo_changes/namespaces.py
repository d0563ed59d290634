"""Globals are those of the code that reads them, wherever it was loaded.

    python -m cProfile train.py                       a profiler, which is `__main__` itself
    exec(source, {"__name__": "model"})               a runner of scripts or notebooks
    module_from_spec(spec_from_file_location(...))    a plugin that is not in sys.modules
    cloudpickle.loads(...)                            functions with globals of their own

Dynamo looks for the globals of an inlined function in the module that `__name__` says. It gives up
where there is none, and where there is another it guards that one's globals and writes to them.
Here guards are on the function's own globals, found by a weak reference to a function that has
them; a strong one, as Dynamo has it since 2.14, would keep a script's models for as long as the
process. A write ends the graph, so that Python does it.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InliningInstructionTranslator._load_global,
                    get_globals_source_and_value    for reads; for writes too
    its import_source, f_globals, funcvar, parent and output
    torch._dynamo.symbolic_convert.InstructionTranslatorBase._load_global
    torch._dynamo.output_graph.OutputGraph.global_scope, install_global_by_id, side_effects
    torch._dynamo.side_effects.SideEffects.is_modified, store_attr_mutations
    torch._dynamo.source.GlobalSource, WeakRefCallSource, AttrSource, DictGetItemSource
    torch._dynamo.variables.PythonModuleVariable, base.VariableTracker
"""

from __future__ import annotations

import itertools
import sys
import weakref
from types import FunctionType
from typing import Any, NoReturn

from torch._dynamo.source import AttrSource, DictGetItemSource, GlobalSource, WeakRefCallSource
from torch._dynamo.symbolic_convert import (
    InliningInstructionTranslator,
    InstructionTranslatorBase,
)
from torch._dynamo.variables import PythonModuleVariable
from torch._dynamo.variables.base import VariableTracker

from amp_graph.dynamo_changes.ended_graphs import end_graph


def _load_own(method: Any, frame: Any, instruction: Any) -> None:
    """Load a global in a frame that is not inlined, or shares its globals."""
    _end_if_written(frame, instruction.argval, by_module=True)
    method(frame, instruction)


def _load_inlined(method: Any, frame: Any, instruction: Any) -> None:
    name = instruction.argval
    if name not in frame.f_globals:
        method(frame, instruction)
        return
    is_found = _is_found(frame)
    _end_if_written(frame, name, by_module=not is_found)
    if is_found:
        method(frame, instruction)
        return
    source = DictGetItemSource(_namespace(frame), name)
    frame.push(VariableTracker.build(frame, frame.f_globals[name], source))


def _to_write(method: Any, frame: Any, name: str) -> Any:
    """Return the variable for a global before Dynamo writes it; reads do not come here."""
    if _is_found(frame):
        return method(frame, name)
    _end(name)


def _end_if_written(frame: Any, name: str, *, by_module: bool) -> None:
    """End the graph where a global was written to by other means, which Dynamo does not see when it
    reads one: `globals()["step"] = 1`, or `plugin.step = 1` if it does not look in that module."""
    own, effects = frame.f_globals, frame.output.side_effects
    if own in effects and effects.is_modified(effects[own]):
        _end(name)
    for written, values in effects.store_attr_mutations.items() if by_module else ():
        is_module = isinstance(written, PythonModuleVariable)
        if is_module and name in values and vars(written.value) is own:
            _end(name)


def _end(name: str) -> NoReturn:
    what = "a global is written to other than through its module"
    end_graph(what, name, "Python does that, and what comes after it")


def _is_found(frame: Any) -> bool:
    """Whether Dynamo finds the globals of a frame. It looks only once for a module: one that takes
    the place of another in sys.modules is not found."""
    own, scope = frame.f_globals, frame.output.global_scope
    if own is scope:
        return True
    module_name = own.get("__name__")
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if getattr(module, "__dict__", None) is not own:
        return False
    try:
        alias = frame.import_source(module_name)
    except AssertionError:  # what was captured before read those of another
        return False
    return scope[alias.global_name] is module


def _namespace(frame: Any) -> Any:
    """The source of a frame's globals. Its name stays the same, so that Dynamo sees which numbers
    change."""
    own, scope = frame.f_globals, frame.output.global_scope
    for number in itertools.count():
        alias = f"__globals_{id(own)}_{number}"
        if alias not in scope:
            function = _function_of(frame)
            if function is None:
                return GlobalSource(frame.output.install_global_by_id("___unnamed_scope", own))
            scope[alias] = weakref.ref(function)
        function = scope[alias]()
        if function is not None and function.__globals__ is own:
            return AttrSource(WeakRefCallSource(GlobalSource(alias)), "__globals__")
    raise AssertionError


def _function_of(frame: Any) -> FunctionType | None:
    """A function that lives as long as a frame's globals; else the one that is called."""
    own = frame.f_globals
    for value in list(own.values()):
        for function in [*vars(value).values()] if isinstance(value, type) else (value,):
            if type(function) is FunctionType and function.__globals__ is own:
                return function
    while getattr(frame, "f_globals", None) is own:
        called: Any = getattr(frame, "funcvar", None)
        function = getattr(called, "fn", None)
        if type(function) is FunctionType and function.__globals__ is own and called.source:
            return function
        frame = getattr(frame, "parent", None)
    return None


CHANGES = (
    (InstructionTranslatorBase, "_load_global", _load_own),
    (InliningInstructionTranslator, "_load_global", _load_inlined),
    (InliningInstructionTranslator, "get_globals_source_and_value", _to_write),
)
