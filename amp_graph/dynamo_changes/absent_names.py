"""Guard the absence of a key or an attribute for which a model branches.

    try: mask = self.masks[n]               in a dictionary: os.environ, ModuleDict, __dict__, too
    except KeyError: mask = self.masks[n] = self.make(n)

    try: self.state.calls += 1              in an object or module, or its lazy properties
    except AttributeError: self.state.calls = 1

    if not self.cache:                      in an OrderedDict or a defaultdict

    h * self.config.scale                   which a `__getattr__` of the user's finds elsewhere

Dynamo captures what the model does then and installs no guard, so that the model would make its
masks, or begin to count, in each call, and an attribute that is set later would not be read. Here a
guard says what is missing.

Private names of PyTorch used here:

    torch._dynamo.variables.ConstDictVariable.getitem_const_raise_exception_if_absent,
    .install_dict_contains_guard, .install_dict_keys_match_guard
    torch._dynamo.variables.UserDefinedObjectVariable, UserDefinedClassVariable: .value
    torch._dynamo.variables.user_defined.UserDefinedDictVariable, OrderedDictVariable,
    DefaultDictVariable: .as_python_constant, ._base_vt
    torch._dynamo.exc.ObservedAttributeError, torch._dynamo.source.AttrSource
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import (
    ConstDictVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    user_defined,
)

from amp_graph.dynamo_changes.own_guards import hold_key, hold_while
from amp_graph.dynamo_changes.replaced import LOOK_UP, Change

ITEM = "getitem_const_raise_exception_if_absent"
CONSTANT = "as_python_constant"
OWN = ("UserDefinedDictVariable", "OrderedDictVariable", "DefaultDictVariable")
DICTS = [kind for n in OWN if CONSTANT in vars(kind := getattr(user_defined, n, object))]
OF_MODULES = ("_parameters", "_buffers", "_modules")


def _get_item(method: Any, asked: Any, frame: Any, key: Any) -> Any:
    if key not in asked:
        asked.install_dict_contains_guard(frame, [key])
    return method(asked, frame, key)


def _look_up(method: Any, variable: Any, frame: Any, name: str) -> Any:
    try:
        found = method(variable, frame, name)
    except ObservedAttributeError:
        if variable.source:
            _hold_while_absent(variable.value, variable.source, name)
        raise
    if variable.source and _is_found_elsewhere(variable.value, name):
        _hold_while_absent(variable.value, variable.source, name)
    return found


def _is_found_elsewhere(owner: Any, name: str) -> bool:
    """Whether an attribute comes of a `__getattr__` of the user's."""
    own = getattr(type(owner), "__getattr__", nn.Module.__getattr__)
    if own is nn.Module.__getattr__ or not hasattr(owner, "__dict__"):
        return False
    return name not in owner.__dict__ and inspect.getattr_static(type(owner), name, own) is own


def _hold_while_absent(owner: Any, source: Any, name: str) -> None:
    """By where it would be kept. To look there runs no code of the model's."""
    if isinstance(owner, type) or not hasattr(owner, "__dict__"):
        if _lacks(name, owner):
            hold_while(_lacks, source, f"it has no {name!r}", name)
        return
    for held in ("__dict__", *(OF_MODULES if isinstance(owner, nn.Module) else ())):
        if name not in getattr(owner, held):
            hold_key(AttrSource(source, held), name, there=False)


def _as_constant(method: Any, asked: Any) -> Any:
    """Where it is asked for its truth, say."""
    items = getattr(asked, "_base_vt", None)
    if asked.source and items is not None:
        items.install_dict_keys_match_guard()
    return method(asked)


def _lacks(name: str, owner: Any) -> bool:
    """Whether an object lacks an attribute, be it a class or of a class with `__slots__`."""
    return not hasattr(owner, name)


CHANGES: tuple[Change, ...] = (
    (ConstDictVariable, ITEM, _get_item),
    (UserDefinedObjectVariable, LOOK_UP, _look_up),
    (UserDefinedClassVariable, LOOK_UP, _look_up),
    *((kind, CONSTANT, _as_constant) for kind in DICTS),
)
