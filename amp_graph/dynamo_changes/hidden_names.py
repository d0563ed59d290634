"""A parameter or module by the name of a property is found where the property's getter fails.

    class Model(nn.Module):
        head = property(lambda self: self._head)

        def __init__(self):
            self.head = nn.Linear(8, 4)     nn.Module keeps it; the property has no say

Python asks the getter for `model.head`, which raises AttributeError, and then
`nn.Module.__getattr__`, which finds it (pytorch_tabular's models are made so). Dynamo takes the
getter's error for the answer, and leaves the function to Python. Here it goes on as Python does.

Private names of PyTorch used here:

    torch._dynamo.variables.UnspecializedNNModuleVariable.manually_trace_nn_module_getattr,
    .get_nn_module_stack_source, .set_nn_module_stack_source
    torch._dynamo.exc.ObservedAttributeError, handle_observed_exception
    torch._dynamo.source.AttrSource
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch._dynamo.exc import ObservedAttributeError, handle_observed_exception
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import UnspecializedNNModuleVariable

from amp_graph.dynamo_changes.replaced import LOOK_UP


def _look_up(method: Any, variable: Any, frame: Any, name: str) -> Any:
    try:
        return method(variable, frame, name)
    except ObservedAttributeError:
        if not _is_hidden(variable.value, name):
            raise
        handle_observed_exception(frame)
    found = variable.manually_trace_nn_module_getattr(frame, name)
    if variable.source and isinstance(found, UnspecializedNNModuleVariable):
        found.set_nn_module_stack_source(AttrSource(variable.get_nn_module_stack_source(), name))
    return found


def _is_hidden(module: nn.Module, name: str) -> bool:
    is_kept = name in module._parameters or name in module._modules or name in module._buffers
    return is_kept and isinstance(inspect.getattr_static(type(module), name, None), property)


CHANGES = ((UnspecializedNNModuleVariable, LOOK_UP, _look_up),)
