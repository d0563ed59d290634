"""The Dynamo front end: a module's code is captured as graphs, with guards.

Private names of PyTorch used here:

    nn.Module._call_impl                     what `module(...)` runs, hooks included
    torch._dynamo.config                     the settings below
    torch._dynamo.optimize, its callback     to have the settings in force while it captures
    torch._dynamo.convert_frame              its lock, and whether an error comes from there
    torch._C._dynamo.eval_frame.reset_code, torch._dynamo.eval_frame.cached_backends
                                             to have Dynamo forget what it captured of a model
    torch._dynamo.disallow_in_graph, torch._VF._pad_packed_sequence
                                             what ends a graph
    torch._dynamo.exc.TorchDynamoException, FailOnRecompileLimitHit
    torch._dynamo.types.ConvertFrameReturn   what it says of a frame
    torch._C._dynamo.eval_frame._FrameAction, _FrameExecStrategy
                                             what is left to Python with all that it calls
    torch._dynamo.eval_frame._stance, DynamoStance
                                             (work on 2.13, there in 2.15) what `set_stance` sets
    torch.utils.checkpoint._CheckpointedFunction            (since 2.14) so is a decorated function
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, reset_code
from torch._dynamo import convert_frame, disallow_in_graph, eval_frame
from torch._dynamo.eval_frame import DynamoStance, cached_backends
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.types import ConvertFrameReturn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import checkpoint

from amp_graph.capture.held_signals import signals_held
from amp_graph.capture.made_for_autocast import is_forward_that_asks
from amp_graph.capture.surroundings import UnderDispatchModes, call_beside_traces, dispatch_depth
from amp_graph.dynamo_changes.in_force import changes_in_force
from amp_graph.dynamo_changes.left_to_python import is_coroutine
from amp_graph.dynamo_changes.replaced import with_entries
from amp_graph.dynamo_changes.said_once import SaidOnce
from amp_graph.dynamo_changes.tensor_classes import is_torch_function
from amp_graph.errors import CaptureError
from amp_graph.modules import Entry, Run

if torch.__version__ < "2.13":
    # Dynamo 2.11 raises at a packed sequence, after the code before it ran. Later ones break the
    # graph there; so does this one now.
    disallow_in_graph(torch._VF._pad_packed_sequence)

# `@checkpoint(use_reentrant=False)`, since 2.14: what it calls is not captured, as a backward pass,
# which runs it again, captures nothing. PyTorch has it so for `checkpoint` itself.
DECORATED = getattr(checkpoint, "_CheckpointedFunction", None)
DECORATED_CALL = None if DECORATED is None else DECORATED.__call__.__code__
WITH_ALL_IT_CALLS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
# Python runs a frame, and others of its code are asked about again: the code may not be the
# model's alone.
LEFT_ALONE = ConvertFrameReturn(apply_to_code=False)

SHARDED: type | None = None  # not every build of PyTorch has torch.distributed
if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule as SHARDED

_capturing = convert_frame.compile_lock  # Dynamo lets one thread at a time capture
# For calls that are no more: the code, and the `id` of its graph compiler.
_abandoned: deque[tuple[types.CodeType, int]] = deque()

GraphCompiler = Callable[[fx.GraphModule, list[Any]], Run]
Capturing = Callable[[types.CodeType, Callable[[], Any]], Any]

CAPTURED_TOO_OFTEN = FailOnRecompileLimitHit
DYNAMO_ERRORS = (TorchDynamoException, CAPTURED_TOO_OFTEN, GuardOnDataDependentSymNode)

SETTINGS: dict[str, Any] = {
    "allow_rnn": True,  # else nn.LSTM, nn.GRU and nn.RNN break the graph and stay in float32
    "capture_scalar_outputs": True,  # else .item() breaks the graph
    "capture_dynamic_output_shape_ops": True,  # else nonzero and masked_select break it
    "recompile_limit": 256,  # else the ninth set of guards sends the model back to eager
    "accumulated_recompile_limit": 4096,
    "allow_unspec_int_on_nn_module": True,  # else a step counter is captured anew at each step
    "use_numpy_random_stream": True,  # else NumPy's random functions draw other numbers
    "skip_guards_on_constant_func_defaults": False,  # else changed defaults are not seen (2.11),
    "skip_tensor_guards_with_matching_dict_tags": False,  # nor what is written into a buffer,
    "use_recursive_dict_tags_for_guards": False,  # nor what changes in objects that a module holds
    "use_lamba_guard_for_object_aliasing": False,  # else Python asks at each call (2.11 to 2.14)
    "skip_nnmodule_hook_guards": False,  # else hooks added after the first call never run
    "fail_on_recompile_limit_hit": True,  # say so, rather than fall back to float32 silently
    "record_runtime_overhead": False,  # else each call of a graph tells a profiler when it begins
    "enable_dynamo_decompositions": False,  # else addcmul_ has no gradient (torch 2.12)
    "optimize_ddp": False,  # else Dynamo cuts graphs at DDP's buckets, for backends that need it
}

# For what it cannot capture: that is often where a number or a size that depends on data is asked
# for its value, of which it tells in many ways. Or, in a later call, at an operator that takes no
# symbolic sizes, such as one of the user's own.
BREAK_AT_DATA = {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}
EACH_SIZE_APART = {"automatic_dynamic_shapes": False}

OFF = "PyTorch's Dynamo is off, by TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or its settings"


class CapturedCode:
    """A function of a module and its arguments that runs the module captured: each graph is given
    to `compile_graph`. Dynamo keeps `compile_graph`, `capturing`, and what they return, for good.

    Dynamo skips frames of torch.nn itself, so that a bare nn.Sequential or nn.LSTM would never be
    captured; this begins with a frame outside torch.nn that calls into it. Its code object and name
    are its own, and `number` is the module's (see `with_new_code`). Hooks of the module are
    captured with it, save those of FSDP. Captures are made by `capturing`, which takes the code of
    the frame, and what captures it. Raises CaptureError if Dynamo is off.
    """

    def __init__(
        self, entry: Entry, number: int, compile_graph: GraphCompiler, capturing: Capturing
    ):
        _forget_abandoned()
        if is_off():
            raise CaptureError(f"{entry.name} cannot be captured: {OFF}")
        self._function = entry.function
        self._is_sharded = entry.is_call and is_sharded(entry.module)
        inner = _forward_alone(entry.module) if self._is_sharded else self._function

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return inner(module, *args, **kwargs)

        own = with_new_code(forward, f"forward_{number}")
        self._code = own.__code__
        context = _context(compile_graph)
        context.callback = _inside_of(capturing, context.callback)
        self._compiled = context(own)
        call_beside_traces(self._compiled)
        kept = self._code, id(compile_graph)
        weakref.finalize(self, _abandoned.append, kept).atexit = False

    def begins_with(self, code: types.CodeType) -> bool:
        """Whether nothing of a call has run when a frame of this code is captured."""
        return code is self._code and not self._is_sharded

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if eval_frame._stance is not DEFAULT and eval_frame._stance != DEFAULT:
            with _stance_aside:
                return self(module, *args, **kwargs)
        if self._is_sharded:
            alone = partial(self._without_hooks, module)
            with with_entries(module.__dict__, {"forward": alone}):
                return self._function(module, *args, **kwargs)
        if dispatch_depth():
            return self._without_hooks(module, *args, **kwargs)
        return self._compiled(module, *args, **kwargs)

    def _without_hooks(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with UnderDispatchModes():
            return self._compiled(module, *args, **kwargs)


class _StanceAside:
    """Puts the script's stance aside while it is entered, by however many threads: a stance is for
    what the script compiles, and what is captured here is none of that."""

    def __init__(self) -> None:
        self._entering, self._depth, self._before = threading.Lock(), 0, DEFAULT

    def __enter__(self) -> None:
        with self._entering:
            if eval_frame._stance != DEFAULT:
                self._before, eval_frame._stance = eval_frame._stance, DEFAULT
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._entering:
            self._depth -= 1
            if not self._depth and eval_frame._stance is DEFAULT:  # else the model has set another
                self._before, eval_frame._stance = DEFAULT, self._before


DEFAULT = eval_frame._stance if eval_frame._stance == DynamoStance() else DynamoStance()
_stance_aside = _StanceAside()


def is_forced_eager() -> bool:
    """Whether nothing that the script compiles is to run: it is to see plain PyTorch."""
    return eval_frame._stance.stance == "force_eager"


def is_off() -> bool:
    """Whether Dynamo is told to capture nothing, by a setting or an environment variable."""
    return dynamo_config.disable or not hasattr(_context(_capture_nothing), "callback")


def _context(compile_graph: GraphCompiler) -> Any:
    with signals_held():  # the first time it imports much
        return torch._dynamo.optimize(backend=compile_graph)


def _capture_nothing(graph: fx.GraphModule, example_inputs: list[Any]) -> Run:
    return graph.forward


def with_new_code(function: Any, name: str) -> types.FunctionType:
    """Return the function with a code object of its own, of this name: Dynamo counts recompilations
    per object, and knows by name which sizes have changed."""
    return types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _forward_alone(module: nn.Module) -> Callable[..., Any]:
    """Return the module's `forward` as a function that takes the module."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    return lambda module, *args, **kwargs: own(*args, **kwargs)


def _forget_abandoned() -> None:
    """Let go of what Dynamo keeps for calls that are no more. Done late: when they go, Dynamo may
    be in the middle of that itself, at the death of an object that it has guards for."""
    with contextlib.suppress(IndexError):
        while True:
            code, backend = _abandoned.popleft()
            reset_code(code)
            cached_backends.pop(backend, None)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module itself. Its hooks gather the parameters, in
    communication that breaks graphs, so they run outside of what is captured."""
    return SHARDED is not None and isinstance(module, SHARDED)


def is_of_capture(error: Exception) -> bool:
    """Whether Dynamo raised an error while it captured, rather than the captured code. Not all such
    errors are of a class of its own: some are assertions that fail inside of it."""
    if isinstance(error, DYNAMO_ERRORS):
        return True
    return convert_frame.__file__ in _files_behind(error)


def is_of_graph(error: Exception) -> bool:
    """Whether an operator of a graph raised an error, which the model's own code may catch
    there."""
    return any(file.startswith("<eval_with_key>") for file in _files_behind(error))


def _files_behind(error: Exception) -> list[str]:
    """Return the files of the code that an error was raised in, and came through."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


def _inside_of(capturing: Capturing, capture: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callback that Dynamo calls for a frame without a graph, made to run inside of
    `capturing`. Settings are in force there alone: setting them around each call of a model would
    cost more than looking up its graph."""

    def capture_inside(frame: Any, *args: Any, **kwargs: Any) -> Any:
        if is_coroutine(frame.f_code):
            return ConvertFrameReturn()  # which leaves it alone
        is_decorated = frame.f_code is DECORATED_CALL
        if is_decorated or is_forward_that_asks(frame) or is_torch_function(frame):
            return ConvertFrameReturn(WITH_ALL_IT_CALLS, apply_to_code=False)
        with signals_held():
            return capturing(frame.f_code, lambda: capture(frame, *args, **kwargs))

    capture_inside._torchdynamo_orig_backend = capture  # type: ignore[attr-defined]
    return capture_inside


@contextlib.contextmanager
def settings(
    chosen: Mapping[str, Any] = SETTINGS, said_once: SaidOnce | None = None
) -> Iterator[None]:
    """Put Dynamo's settings in force while it captures, and the user's own back after. One thread
    at a time, as they are the process's."""
    said_once = said_once or SaidOnce()
    with _capturing, said_once.around_capture():
        before = {name: getattr(dynamo_config, name) for name in chosen}
        try:
            for name, value in chosen.items():
                setattr(dynamo_config, name, value)
            with changes_in_force():
                yield
        finally:
            for name, value in before.items():
                setattr(dynamo_config, name, value)
