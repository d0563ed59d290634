"""Whether a name is in an object's own `__dict__` is guarded where a model asks for it.

    if "cache" not in self.__dict__:        so do models that set themselves up at the first call;
        self.cache = self.make(x)           vars(self), .get and .setdefault, too

Dynamo captures the answer of one call and installs no guard, so that the model would set itself up
in each call.

Private names of PyTorch used here:

    torch._dynamo.variables.DunderDictVariable.install_dict_contains_guard, .call_method, .source,
    of which the base, torch._dynamo.source.AttrSource, is the object's
    torch._dynamo.variables.misc.GetAttrVariable.call_method, .name, .obj, .obj.source, .obj.value
                                                    before those
"""

from __future__ import annotations

from typing import Any

import torch._dynamo.variables
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.misc import GetAttrVariable

from amp_graph.dynamo_changes.own_guards import hold_key, value_of
from amp_graph.dynamo_changes.replaced import Change

DICTS: Any = getattr(torch._dynamo.variables, "DunderDictVariable", None)
QUESTIONS = ("__contains__", "get", "setdefault")


def _call_method(method: Any, attribute: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    if attribute.name == "__dict__" and name in QUESTIONS and args:
        owner = attribute.obj
        _guard(owner.source, getattr(owner, "value", None), args[0])
    return method(attribute, frame, name, args, kwargs)


def _set_default(method: Any, asked: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "setdefault" and args:
        _guard_key(asked, frame, args[0])
    return method(asked, frame, name, args, kwargs)


def _install(method: Any, asked: Any, frame: Any, args: Any) -> None:
    """In place of nothing."""
    _guard_key(asked, frame, args[0])


def _guard_key(asked: Any, frame: Any, key: Any) -> None:
    if isinstance(asked.source, AttrSource):
        owner = asked.source.base
        _guard(owner, value_of(owner, frame), key)


def _guard(source: Any, owner: Any, name: Any) -> None:
    if source is not None and name.is_python_constant():
        key = name.as_python_constant()
        hold_key(AttrSource(source, "__dict__"), key, key in owner.__dict__)


CHANGES: tuple[Change, ...] = (
    (DICTS, "install_dict_contains_guard", _install),
    (DICTS, "call_method", _set_default),
)
if DICTS is None:
    CHANGES = ((GetAttrVariable, "call_method", _call_method),)
