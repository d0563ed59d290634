"""A number that NumPy makes of known numbers is a number, as it is without Dynamo.

    x.view(-1, np.prod(x.shape[1:]))                    sizes of images, as Perceiver has them
    u = factor * np.ceil(np.log(n)).astype("int").item()     how many queries Informer looks at
    torch.arange(n) * np.sqrt(0.5)                      float32, where a float64 tensor is float64
    if np.log(n) > 2:    if torch.is_tensor(np.max(sizes)):    range(np.prod(steps))
    self.hop_length = np.prod(rates)        as audio codecs have it

Dynamo has a tensor in its place. Here such a number is worked out by NumPy itself, and given to
what is not NumPy's. Between operators of NumPy it stays Dynamo's, which knows their methods. One
that the model holds, or is given, is known as long as it stays the same.

Private names of PyTorch used here:

    torch._dynamo.variables.NumpyNdarrayVariable            what NumPy returns
    torch._dynamo.variables.builder.wrap_fx_proxy_cls       makes a variable of a node
    torch._dynamo.variables.builder.VariableBuilder._wrap, .tx, .source
                                            makes one of what a model holds or is given
    torch._dynamo.variables.LazyVariableTracker.is_realized, .peek_value
                                            what nothing has read yet
    torch._dynamo.pgo.process_automatic_dynamic, FrameStateSizeEntry.make_scalar, auto_dynamic
                                            whether a number has changed
    torch._dynamo.guards.install_guard
    torch._dynamo.variables.BuiltinVariable.fn              a function or operator of Python's
    torch._dynamo.variables.TensorVariable, tensor.SymNodeVariable
                                            a value of the graph; a number that is not known
    torch._dynamo.variables.ListVariable, TupleVariable     .items
    torch._dynamo.symbolic_convert.InstructionTranslatorBase.current_instruction,
        next_instruction, output.current_tx     what is done now, in the innermost frame, and next
    torch._dynamo.variables.misc.get_tnp_to_np_map          NumPy's functions, by PyTorch's
    torch._refs.tensor                                      Dynamo's torch.tensor of numbers
    torch._dynamo.utils.numpy_to_tensor_wrapper.f, numpy_method_wrapper.method,
        numpy_operator_wrapper.op                           what a node of the graph calls
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._dynamo import utils
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, process_automatic_dynamic
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    LazyVariableTracker,
    ListVariable,
    NumpyNdarrayVariable,
    TensorVariable,
    TupleVariable,
    builder,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import get_tnp_to_np_map
from torch._dynamo.variables.tensor import SymNodeVariable

from amp_graph.dynamo_changes.replaced import Change

# Among what a node of Dynamo's knows of itself.
WORKED_OUT, HELD = "worked out by NumPy", "what the model holds, and where"
NUMBERS = (int, float, bool)
PLAIN = (*NUMBERS, complex, str, type(None))
BOOLEANS = ("bool", "bool_")  # NumPy's, since 2.0 and before
COMPUTED = (TensorVariable, SymNodeVariable)
# These make of a number of NumPy's the same as of Python's, and nothing of NumPy's.
TAKING = {range, round, int, float, bool, operator.not_}
BRANCH = ("POP_JUMP", "JUMP_IF", "TO_BOOL")
TYPED = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch._refs.tensor}


def unread_numbers(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of such numbers that nobody reads in the graph: they were given away."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.meta.get(WORKED_OUT) is not None and found.issuperset(node.users):
            found.add(node)
    return found


def _known(value: Any) -> Any:
    """Return the number that NumPy makes of known ones, NumPy's or Python's, or that the model
    holds; None of what is no such number."""
    if isinstance(value, LazyVariableTracker) and (
        value.is_realized() or _is_number(value.peek_value())
    ):
        value = value.realize()
    if type(value) is not NumpyNdarrayVariable:  # `isinstance` would read what nothing has read
        return None
    return _worked_out(value.as_proxy().node)


def _worked_out(node: fx.Node) -> Any:
    if HELD in node.meta:
        return _held(*node.meta[HELD])
    if WORKED_OUT not in node.meta:
        node.meta[WORKED_OUT] = _call(node)
    return node.meta[WORKED_OUT]


def _held(number: Any, source: Any) -> Any:
    is_boolean = type(number).__name__ in BOOLEANS  # of which there are two
    install_guard(
        source.make_guard(GuardBuilder.ID_MATCH if is_boolean else GuardBuilder.EQUALS_MATCH)
    )
    return number


def _is_number(value: Any) -> bool:
    """Whether it is a number of NumPy's, but for one that is not equal to itself."""
    if type(value).__module__ != "numpy":
        return False
    import numpy as np

    return isinstance(value, np.integer | np.floating | np.bool_) and bool(value == value)


def _is_narrow(number: Any) -> bool:
    """Whether computing with it is less exact than with Python's."""
    return number.dtype.kind == "f" and not isinstance(number, float)


def _wrap_given(method: Any, builder: Any, value: Any) -> Any:
    """Note where a number of NumPy's comes from, as long as it has always been the same."""
    variable = method(builder, value)
    if type(variable) is NumpyNdarrayVariable and _is_number(value):
        entry = FrameStateSizeEntry.make_scalar(value.item())
        seen = process_automatic_dynamic(builder.tx, builder.source.name, entry)
        if seen.scalar is not auto_dynamic:
            variable.as_proxy().node.meta[HELD] = value, builder.source
            asks = builder.tx.output.current_tx.current_instruction
            if asks.opname.startswith(BRANCH) and not _is_narrow(value):
                # A new one: it is told where it came from, and what `create` returns is Dynamo's
                # for good.
                return ConstantVariable(_known(variable).item())
    return variable


def _call(node: fx.Node) -> Any:
    function = _function(node.target)
    if function is None:
        return None
    import numpy as np  # which is there, as the model calls it

    try:
        args, kwargs = _argument(node.args), _argument(node.kwargs)
        with np.errstate(all="ignore"):
            found = function(*args, **kwargs)
    except Exception:  # whatever it is, the model's own code is yet to meet it
        return None
    return found if isinstance(found, np.number | np.bool_ | int | float) else None


def _function(target: Any) -> Any:
    """Return NumPy's function for one of PyTorch's."""
    if isinstance(target, utils.numpy_to_tensor_wrapper):
        functions: Any = get_tnp_to_np_map()
        return functions.get(target.f)
    if isinstance(target, utils.numpy_operator_wrapper):
        return target.op
    if isinstance(target, utils.numpy_method_wrapper):
        return lambda value, *args, **kwargs: getattr(value, target.method)(*args, **kwargs)
    return None


def _argument(given: Any) -> Any:
    """Return an argument as NumPy takes it. Raises where it is not known."""
    if isinstance(given, fx.Node):
        found = _worked_out(given)
        if found is None:
            raise ValueError
        return found
    if isinstance(given, dict):
        return {name: _argument(value) for name, value in given.items()}
    if isinstance(given, tuple | list):
        return type(given)([_argument(value) for value in given])
    if type(given) not in PLAIN and not isinstance(given, type):
        raise ValueError
    return given


def _wrap(method: Any, target_cls: Any, tx: Any, proxy: Any, *given: Any, **options: Any) -> Any:
    """Make a constant of what NumPy returned if it is a number of Python's already, such as that
    of `item()`, or if it was compared and the model branches on it."""
    if target_cls is NumpyNdarrayVariable:
        found = _worked_out(proxy.node)
        is_branch = tx.next_instruction.opname.startswith(BRANCH)
        if type(found) in NUMBERS or (is_branch and type(found).__name__ in BOOLEANS):
            return ConstantVariable.create(found if type(found) in NUMBERS else bool(found))
    return method(target_cls, tx, proxy, *given, **options)


def _plain(value: Any) -> Any:
    """Return an argument with Python's numbers in place of NumPy's, also in a list."""
    if type(value) in (ListVariable, TupleVariable):
        items = [_plain(item) for item in value.items]
        is_other = any(new is not old for new, old in zip(items, value.items, strict=True))
        return type(value)(items) if is_other else value
    found = _known(value)
    return value if found is None else ConstantVariable.create(found.item())


def _call_builtin(method: Any, builtin: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if any(_known(value) is not None for value in args):
        args = [value.realize() for value in args]
        if builtin.fn in TAKING or any(type(value) in COMPUTED for value in args):
            args = [_plain(value) for value in args]
        elif builtin.fn is isinstance and args[1].is_python_constant():
            is_one = isinstance(_known(args[0]), args[1].as_python_constant())
            return ConstantVariable.create(is_one)
    return method(builtin, frame, args, kwargs)


def _is_tensor(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if args and isinstance(args[0].realize(), NumpyNdarrayVariable):
        return ConstantVariable.create(False)
    return method(function, frame, args, kwargs)


def _call_function(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if function.value not in TYPED:  # these look at the type of a number
        args = [_plain(value) for value in args]
        kwargs = {name: _plain(value) for name, value in kwargs.items()}
    return method(function, frame, args, kwargs)


def _call_method(method: Any, tensor: Any, frame: Any, name: str, args: Any, kwargs: Any) -> Any:
    if type(tensor) is TensorVariable and name != "new_tensor":  # looks at the type of a number
        args = [_plain(value) for value in args]
        kwargs = {key: _plain(value) for key, value in kwargs.items()}
    return method(tensor, frame, name, args, kwargs)


CALLS = {torch.is_tensor: _is_tensor}
AROUND = (_call_function,)
CHANGES: tuple[Change, ...] = (
    (builder, "wrap_fx_proxy_cls", _wrap),
    (VariableBuilder, "_wrap", _wrap_given),
    (BuiltinVariable, "call_function", _call_builtin),
    (TensorVariable, "call_method", _call_method),
)
