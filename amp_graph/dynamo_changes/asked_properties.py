"""Whether an object has an attribute that is a property: its getter is captured, and not run.

    class Augmentation(nn.Module):          as in kornia
        @property
        def matrix(self):
            if self._matrix is None and self._args is not None:
                self._matrix, self._args = make_matrix(*self._args), None
            return self._matrix

    matrix = getattr(augmentation, "matrix", None)

Dynamo captures the getter for the answer, and once more for the value, so that what it writes is
written twice. It guards the name as well (2.13), and runs the getter for that, when it writes the
guard and before each call: what that writes is written ahead of time, and other guards find it so.
Here the getter is captured once, and the name has no guard, since what the getter reads has.

Private names of PyTorch used here:

    torch._dynamo.variables.UserDefinedObjectVariable.call_obj_hasattr, .value
    torch._dynamo.exc.ObservedAttributeError, handle_observed_exception
"""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

from torch._dynamo.exc import ObservedAttributeError, handle_observed_exception
from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable

from amp_graph.dynamo_changes.replaced import LOOK_UP, Change


def _has(method: Any, variable: Any, frame: Any, name: str) -> Any:
    if not _is_property(variable, name):
        return method(variable, frame, name)
    return ConstantVariable.create(_asked(variable, frame, name) is not None)


def _get(method: Any, variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 3:
        return method(variable, frame, args, kwargs)
    asked, name, default = args[0].realize(), args[1].realize(), args[2]
    if not name.is_python_constant() or not _is_property(asked, name.as_python_constant()):
        return method(variable, frame, args, kwargs)
    found = _asked(asked, frame, name.as_python_constant())
    return default if found is None else found


def _is_property(variable: Any, name: str) -> bool:
    is_object = isinstance(variable, UserDefinedObjectVariable)
    return is_object and isinstance(getattr_static(type(variable.value), name, None), property)


def _asked(variable: Any, frame: Any, name: str) -> Any:
    """Return what a getter returns, or None if it says that there is nothing."""
    try:
        return getattr(variable, LOOK_UP)(frame, name)
    except ObservedAttributeError:
        handle_observed_exception(frame)
        return None


BUILTINS = {getattr: _get}
CHANGES: tuple[Change, ...] = ((UserDefinedObjectVariable, "call_obj_hasattr", _has),)
