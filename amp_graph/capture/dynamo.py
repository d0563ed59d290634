"""The Dynamo front end: what a module executes is captured as graphs, with guards.

Private names of PyTorch used here, and the versions they were seen to work on (2.11 is the
lowest that users run, 2.13 what the tests use):

    nn.Module._call_impl          2.13   what `module(...)` runs, hooks included
    torch._dynamo.config.patch    2.13   the settings below
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException

GraphCompiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

DynamoError = TorchDynamoException

SETTINGS: dict[str, Any] = {
    "allow_rnn": True,  # else nn.LSTM, nn.GRU and nn.RNN break the graph and stay in float32
    "capture_scalar_outputs": True,  # else .item() breaks the graph
    "capture_dynamic_output_shape_ops": True,  # else nonzero and masked_select break it
    "recompile_limit": 256,  # else the ninth set of guards sends the model back to eager
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,  # say so, rather than fall back to float32 silently
}


def captured_call(module: nn.Module, compile_graph: GraphCompiler) -> Callable[..., Any]:
    """Return a function that runs `module(...)` with every graph of it given to `compile_graph`.

    Dynamo skips frames of torch.nn itself, so that a bare nn.Sequential or nn.LSTM would never
    be captured; the function returned is a frame outside torch.nn that calls into it. Its code
    object is its own, because Dynamo counts recompilations per code object.
    """
    call_impl = type(module)._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call_impl(module, *args, **kwargs)

    own = types.FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    compiled = torch.compile(own, backend=compile_graph)

    def call(*args: Any, **kwargs: Any) -> Any:
        with settings():
            return compiled(*args, **kwargs)

    return call


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Dynamo's settings while a converted model runs; the user's own are put back after."""
    before = {name: getattr(dynamo_config, name) for name in SETTINGS}
    try:
        for name, value in SETTINGS.items():
            setattr(dynamo_config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(dynamo_config, name, value)
