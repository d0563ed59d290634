"""Capture tensors of a class with `__torch_function__` as Python computes with them.

    class Image(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            if hasattr(args[0], "__dict__"):
                result.__dict__ = copy(args[0].__dict__)
            return result

Dynamo knows nothing of the `__dict__` of a tensor, and what is kept in it would be lost without a
word. Here a graph ends where it is asked for, unless nothing is in it. The method is then Python's,
with all that it calls: captured by itself it would be a graph of one operator, and Dynamo (2.13)
may return another object than it did.

What runs in place of a captured frame gives a tensor its class by the method `as_subclass`. A
library that puts its own in that place (fastai, which hands on the `__dict__`) may have it
captured, too; what runs in its place would then call it without end. Here PyTorch's own method is
called.

Private names of PyTorch used here:

    torch._dynamo.variables.torch_function.TensorWithTFOverrideVariable.call_obj_hasattr
    torch._dynamo.output_graph.OutputGraph.side_effects
    SideEffects.store_attr_mutations                    what the captured code sets
    torch._dynamo.codegen.PyCodegen.load_import_from    to read a name of a module in such code
    torch._dynamo.utils.to_subclass                     the function that it calls
    torch._C.TensorBase.as_subclass                     PyTorch's own method
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

from amp_graph.callers import first_argument
from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.own_guards import hold_while, value_of
from amp_graph.dynamo_changes.replaced import LOOK_UP, Change

TO_SUBCLASS = "torch._dynamo.utils", "to_subclass"


def is_torch_function(frame: Any) -> bool:
    """Whether Python, outside of a graph, calls the method of such a class for an operator."""
    if frame.f_code.co_name != "__torch_function__":
        return False
    kind = first_argument(frame)
    return isinstance(kind, type) and issubclass(kind, torch.Tensor)


def _ask(method: Any, tensor: Any, frame: Any, name: str) -> Any:
    """Ask for an attribute, or whether there is one."""
    _end_if_asked_for_attributes(tensor, frame, name)
    return method(tensor, frame, name)


def _end_if_asked_for_attributes(tensor: Any, frame: Any, name: str) -> None:
    if name != "__dict__":
        return
    if tensor.source:
        if not _is_bare(value_of(tensor.source, frame)):
            _end_at(tensor)
        hold_while(_is_bare, tensor.source, "it has no attributes of its own")
    if frame.output.side_effects.store_attr_mutations.get(tensor):
        _end_at(tensor)


def _end_at(tensor: Any) -> NoReturn:
    kind = tensor.class_type.__name__
    end_graph(f"attributes kept in a tensor of class {kind}", tensor)


def _is_bare(tensor: torch.Tensor) -> bool:
    return not tensor.__dict__


def of_class(tensor: torch.Tensor, kind: type) -> Any:
    """Return a tensor as one of a class."""
    return torch._C.TensorBase.as_subclass(tensor, kind)


def _load(method: Any, written: Any, module: str, name: str) -> None:
    is_asked_for = (module, name) == TO_SUBCLASS
    method(written, *((__name__, of_class.__name__) if is_asked_for else (module, name)))


CHANGES: tuple[Change, ...] = (
    (TensorWithTFOverrideVariable, "call_obj_hasattr", _ask),
    (TensorWithTFOverrideVariable, LOOK_UP, _ask),
    (PyCodegen, "load_import_from", _load),
)
