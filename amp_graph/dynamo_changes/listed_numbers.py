"""A tensor of numbers from a list, which may be others in the next call.

    torch.tensor(lengths)       a number that has changed is a symbol to Dynamo
    torch.as_tensor(lengths)    here it is a constant, so that each list would be captured apart;
    torch.LongTensor(lengths)   these are captured like the first

Each symbol takes milliseconds. Where there are many, such as samples that a model draws by
`random`, the graph ends, and Python makes the tensor.

    torch.FloatTensor(x.size())     a tensor of that size, which Dynamo captures as a tensor with
                                    the size's numbers (torch 2.11 to 2.14)

Private names of PyTorch used here:

    torch._dynamo.variables.TorchInGraphFunctionVariable, UserDefinedClassVariable
                                                               .call_function, .value
    torch._dynamo.variables.ListVariable, TupleVariable .items
    torch._dynamo.variables.lists.SizeVariable
    torch._dynamo.variables.tensor.SymNodeVariable, UnspecializedPythonVariable
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch._dynamo.variables import (
    ListVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
    UserDefinedClassVariable,
    VariableTracker,
)
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.tensor import SymNodeVariable, UnspecializedPythonVariable

from amp_graph.dynamo_changes.ended_graphs import end_graph
from amp_graph.dynamo_changes.replaced import by_function, those_of

MANY = 256
MAKING = (torch.tensor, torch.as_tensor, torch.asarray)
OPTIONS = {"dtype", "device"}  # of all of these
SEQUENCES = ListVariable | TupleVariable
NUMBERS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
LEGACY = (
    torch.Tensor,
    *(t for place in (torch, torch.cuda) for t in those_of(place, [f"{n}Tensor" for n in NUMBERS])),
)


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    is_alike = function.value is torch.tensor or kwargs.keys() <= OPTIONS
    if is_alike and len(args) == 1 and _has_symbols(args[0]):
        function = TorchInGraphFunctionVariable(torch.tensor)
    return method(function, frame, args, kwargs)


def _make(method: Any, kind: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    made_by: Callable[..., Any] | None = None
    if len(args) == 1 and not kwargs:
        given = args[0].realize()
        if isinstance(given, SizeVariable):
            made_by = torch.empty
        elif isinstance(given, SEQUENCES) and _has_symbols(given):
            made_by = torch.tensor
    if made_by is None:
        return method(kind, frame, args, kwargs)
    like = kind.value()
    options = {"dtype": like.dtype, "device": like.device}
    kwargs = {name: VariableTracker.build(frame, value) for name, value in options.items()}
    return TorchInGraphFunctionVariable(made_by).call_function(frame, args, kwargs)


def _has_symbols(data: Any) -> bool:
    """Whether there are any in a list, or in lists in it. Ends the graph if there are many."""
    found = sum(1 for _ in islice(_symbols(data), MANY))
    if found == MANY:
        end_graph("a tensor of many numbers that change", f"{MANY} or more", "Python makes it")
    return found > 0


def _symbols(data: Any) -> Iterator[Any]:
    value = data.realize()
    if isinstance(value, SEQUENCES):
        for item in value.items:
            yield from _symbols(item)
    elif isinstance(value, SymNodeVariable | UnspecializedPythonVariable):
        yield value


CALLS = dict.fromkeys(MAKING, _call)
CHANGES = (by_function(UserDefinedClassVariable, dict.fromkeys(LEGACY, _make)),)
