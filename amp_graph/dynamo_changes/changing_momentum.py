"""A momentum of batch norm that changes, or depends on data, is applied behind the kernel.

    BatchNorm2d(8, momentum=None)           1 / the number of batches so far, as while weights are
                                            averaged (`torch.optim.swa_utils.update_bn`)
    layer.momentum *= 0.5                   in each epoch, as for networks of points

The kernel takes a number. Dynamo ends the graph at one that depends on data, and captures each
other one anew. Given 1, the kernel leaves the statistics of this batch, of which the average with
those before is what it would have made.

Private names of PyTorch used here:

    torch._dynamo.variables.tensor.SymNodeVariable                  a number that changes
    torch._dynamo.variables.UserFunctionVariable.call_function      a function to capture
    torch._dynamo.variables.TensorVariable                          a value of the graph
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch._dynamo.variables import TensorVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable


def _norm(  # with the signature of F.batch_norm
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Any:
    of_batch = running_mean.clone(), running_var.clone()
    result = F.batch_norm(input, *of_batch, weight, bias, training, 1.0, eps)
    for so_far, now in zip((running_mean, running_var), of_batch, strict=True):
        so_far.mul_(1 - momentum).add_(now * momentum)
    return result


PARAMETERS = inspect.signature(_norm)


def _call(method: Any, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    if not _is_taken_as_it_is(**PARAMETERS.bind(*args, **kwargs).arguments):
        return method(function, frame, args, kwargs)
    stand_in = UserFunctionVariable(_norm)  # type: ignore[arg-type]
    return stand_in.call_function(frame, [*args], kwargs)


def _is_taken_as_it_is(
    running_mean: Any, running_var: Any, training: Any = None, momentum: Any = None, **others: Any
) -> bool:
    """Whether statistics are written with a momentum that changes."""
    written = (running_mean.realize(), running_var.realize())
    is_training = training is not None and training.realize().is_python_constant()
    return (
        is_training
        and bool(training.as_python_constant())
        and momentum is not None
        and isinstance(momentum.realize(), SymNodeVariable)
        and all(isinstance(value, TensorVariable) for value in written)
    )


CALLS = {F.batch_norm: _call}
