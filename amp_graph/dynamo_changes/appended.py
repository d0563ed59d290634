"""A list that a model only appends to is not read, nor is a dictionary that it fills by numbers.

    def log(module, args, output):
        activations[name].append((output.mean().item(), output.shape))
        self.seen += [output.shape]
        self.means[self.step] = output.mean()

Dynamo reads the list, and guards how many items it has: one more in each call, for which the model
would be captured in each call. Here the item is appended behind the graph, as Dynamo does with what
is to be printed. Where the model reads the list as well, behind that, it is captured as ever.

`self.seen += items` sets the attribute, too, to the list that it is: that is left out.

Private names of PyTorch used here:

    torch._dynamo.symbolic_convert.InstructionTranslatorBase._load_attr, .stack, .push, .pop
        .popn, .export, .dispatch_table (by captured_instructions)
    InstructionTranslatorBase.speculation_log, .clear    kept where a capture begins anew
    .output.root_tx.debug_locals                 calls behind a graph, and what they are given
    .output.current_tracer, .root_tracer, .side_effects
        .side_effects.has_pending_mutation_of_attr, .is_modified    what was set before
    torch._dynamo.variables.misc.DebuggingVariable, ._nonvar_fields      what is called there
    torch._dynamo.variables.LazyVariableTracker.peek_value, .peek_type    what nothing has read
    torch._dynamo.variables.TensorVariable, tensor.SymNodeVariable
    torch._dynamo.variables.ListVariable, TupleVariable, lists.SizeVariable, ConstDictVariable
    torch._dynamo.variables.UserDefinedObjectVariable.value, VariableTracker.python_type, .source
    torch._dynamo.variables.builder.VariableBuilder._wrap, .tx    reads a list
    torch._dynamo.exc.SpeculationRestartAnalysis                 by which that begins anew
    torch._dynamo.source.AttrSource, DictGetItemSource, GetItemSource
"""

from __future__ import annotations

import dis
import functools
import operator
from collections import OrderedDict, defaultdict
from typing import Any

from torch import nn
from torch._dynamo.exc import SpeculationRestartAnalysis
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import DebuggingVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.asked_lists import holds_list
from amp_graph.dynamo_changes.captured_instructions import instructions_through
from amp_graph.dynamo_changes.replaced import Change
from amp_graph.dynamo_changes.unknown_text import TEXTS
from amp_graph.dynamo_changes.unread import LISTS, class_of_list, class_of_unread

DICTIONARIES = (dict, defaultdict, OrderedDict)
GROWING = (*LISTS, *DICTIONARIES)
PLACES = {**dict.fromkeys(DICTIONARIES, DictGetItemSource), list: GetItemSource}
METHODS = ("append", "extend")
SINGLE = (TensorVariable, ConstantVariable, SymNodeVariable, *TEXTS)
SEQUENCES = (ListVariable, TupleVariable, SizeVariable)
# Such containers by ids, as attributes of what Dynamo keeps for an attempt, and for all of a frame.
APPENDED, READ = "_amp_graph_appended", "_amp_graph_read"
MOST = 4  # of them in a frame, for each of which its capture begins anew


def _ids(holder: Any, name: str) -> set[int]:
    ids: set[int] = vars(holder).setdefault(name, set())
    return ids


class _Grow(DebuggingVariable):
    """A method of a list or dictionary that nothing has read, by which it grows."""

    # Not read where a graph ends.
    _nonvar_fields = {"held", *DebuggingVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, held: Any, name: str) -> None:
        super().__init__(getattr(held.peek_type(), name), source=AttrSource(held.source, name))
        self.held, self.name = held, name

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        if kwargs or not self.waits(tx, args):
            return self.held.realize().call_method(tx, self.name, [*args], kwargs)
        return ConstantVariable.create(None)

    def waits(self, frame: Any, args: Any) -> bool:
        """Whether the call waits for the end of the graph, which is told of it then."""
        output = frame.output
        is_inner = output.current_tracer is not output.root_tracer
        if is_inner or not self._takes(*args) or class_of_list(self.held, GROWING) is None:
            return False  # it was read meanwhile, perhaps
        _ids(output, APPENDED).add(id(self.held.peek_value()))
        output.root_tx.debug_locals.append((self, [*args]))
        return True

    def _takes(self, *given: Any) -> bool:
        """Whether what is given may be appended at the end of the graph. Of an unread list it is
        not known whether it is the one that grows."""
        if self.name == "__setitem__":
            return _is_number(given[0]) and _stays(given[1])
        if len(given) != 1 or not _stays(given[0]):
            return False
        is_list = class_of_unread(given[0]) is None and isinstance(given[0], SEQUENCES)
        return is_list or self.name == "append"


def _is_number(key: Any) -> bool:
    """Whether a key is a number: keys with names are the same in each call."""
    key = key.realize()
    is_constant = key.is_python_constant() and type(key.as_python_constant()) is int
    return is_constant or isinstance(key, SymNodeVariable)


def _stays(item: Any) -> bool:
    """Whether an item is the same at the end of the graph: what was given, and not read, and what
    is made of such items."""
    if class_of_unread(item) is not None and item.source is not None:
        return True
    item = item.realize()
    if isinstance(item, SEQUENCES):
        return all(map(_stays, item.items))
    if isinstance(item, ConstDictVariable):
        return all(map(_stays, item.items.values()))
    return isinstance(item, SINGLE)


def growth_of(held: Any, name: str, frame: Any) -> Any:
    """Return what Dynamo is to take for such a method of a list, or None to go on as ever."""
    is_growth = name in METHODS and class_of_unread(held) in LISTS
    return _Grow(held, name) if is_growth and _may_wait(held, frame) else None


def _store(capture: Any, frame: Any, instruction: Any) -> Any:
    """`held[number] = item` of a dictionary that grows, or `held[key] += items` of a list in it."""
    if _fills(frame, *frame.stack[-3:]) or _is_put_back(frame, *frame.stack[-3:]):
        frame.popn(3)
    else:
        capture(frame, instruction)


def _fills(frame: Any, item: Any, held: Any, key: Any) -> bool:
    may_wait = class_of_unread(held) in DICTIONARIES and _may_wait(held, frame)
    return may_wait and _Grow(held, "__setitem__").waits(frame, [key, item])


def _is_put_back(frame: Any, held: Any, owner: Any, key: Any) -> bool:
    """Whether a dictionary, or a list, has had this list by this key since before the call."""
    kind = owner.python_type() if _is_appended(held, frame) else None
    if kind not in PLACES or owner.source is None or not key.is_python_constant():
        return False
    is_set = frame.output.side_effects.is_modified(owner.realize())
    return not is_set and held.source == PLACES[kind](owner.source, key.as_python_constant())


def _add(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """`held += items` is `held.extend(items)`, and then `held` is put where it was."""
    growth = growth_of(args[0], "extend", frame)
    if growth is not None and growth.waits(frame, args[1:]):
        return args[0]
    return method(builtin, frame, args, kwargs)


def _put(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Dynamo reads a list that an object is to hold. One that it holds already need not be."""
    if len(args) == 3 and _is_appended(args[2], frame) and _holds(frame, *args):
        return ConstantVariable.create(None)
    return method(builtin, frame, args, kwargs)


def _is_appended(held: Any, frame: Any) -> bool:
    is_unread = class_of_unread(held) in LISTS
    return is_unread and id(held.peek_value()) in _ids(frame.output, APPENDED)


def _holds(frame: Any, owner: Any, name: Any, held: Any) -> bool:
    """Whether an attribute is this list since before the call, and no code runs where it is set."""
    if not isinstance(owner, UserDefinedObjectVariable) or not name.is_python_constant():
        return False
    name = name.as_python_constant()
    is_plain = type(owner.value).__setattr__ in (object.__setattr__, nn.Module.__setattr__)
    is_set = frame.output.side_effects.has_pending_mutation_of_attr(owner, name)
    is_there = owner.source is not None and held.source == AttrSource(owner.source, name)
    return is_plain and not is_set and is_there and holds_list(owner.value, name)


def _look_up(method: Any, frame: Any, name: str) -> Any:
    growth = growth_of(frame.stack[-1], name, frame)
    if growth is None:
        return method(frame, name)
    frame.pop()
    frame.push(growth)
    return None


def _may_wait(held: Any, frame: Any) -> bool:
    value, read = held.peek_value(), _ids(frame.speculation_log, READ)
    is_read = id(value) in read or len(read) >= MOST or value in frame.output.side_effects
    return held.source is not None and not is_read and not frame.export


def _read(method: Any, builder: Any, value: Any) -> Any:
    if type(value) in GROWING and id(value) in _ids(builder.tx.output, APPENDED):
        _ids(builder.tx.speculation_log, READ).add(id(value))
        # What is set is captured by other instructions now, which Dynamo would miss in its log.
        builder.tx.speculation_log.clear()
        raise SpeculationRestartAnalysis(restart_reason="a list that was appended to is read")
    return method(builder, value)


BUILTINS = {operator.iadd: _add, setattr: _put}
CONTEXTS = (functools.partial(instructions_through, _store, {dis.opmap["STORE_SUBSCR"]}),)
CHANGES: tuple[Change, ...] = (
    (InstructionTranslatorBase, "_load_attr", _look_up),
    (VariableBuilder, "_wrap", _read),
)
