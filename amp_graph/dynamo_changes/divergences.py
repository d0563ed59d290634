"""The search for the function that computes a divergence does not end a graph.

    loss = kl_divergence(Normal(mean, std), Normal(0.0, 1.0))    as variational models ask

PyTorch looks the function up by the two classes, and remembers what it found. Dynamo cannot follow
the search, and what is remembered would make it capture the next call anew.

Private names of PyTorch used here:

    torch.distributions.kl._dispatch_kl                     the search
    torch._dynamo.variables.UserFunctionVariable            a function to capture
    torch._dynamo.variables.UserDefinedObjectVariable       an object; .value_type
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._dynamo.variables import UserDefinedObjectVariable, UserFunctionVariable
from torch.distributions import kl


def _divergence(code: Any, frame: Any, *given: Any) -> Any:
    """Call the function for these classes; None if there is none, which raises."""
    if len(given) != 2 or not all(isinstance(v, UserDefinedObjectVariable) for v in given):
        return None
    function = kl._dispatch_kl(*[value.value_type for value in given])
    if not isinstance(function, FunctionType):
        return None
    return UserFunctionVariable(function).call_function(frame, [*given], {})


FINDS = {("torch.distributions.kl", "kl_divergence"): _divergence}
