"""The surroundings of a call of a model: transforms, tracers, dispatch modes.

Private names of PyTorch used here:

    TorchDispatchMode.ignore_compile_internals,
    torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals
                                             let compiled code run under a dispatch mode
    torch._C._functorch.peek_interpreter_stack, get_interpreter_stack
                                             whether a functorch transform is active, and which
    torch._C._get_tracing_state              whether `torch.jit.trace` is at work
    torch.jit._trace._check_trace            by which that compares its result with the model
    torch.fx._symbolic_trace._is_fx_tracing_flag, _get_is_fx_tracing since 2.14
                                             whether `torch.export` or `make_fx` is
    is_fx_symbolic_tracing                   the same, in the closure of what Dynamo wraps
    torch.compiler._is_exporting_flag        the same of `torch.export`, for Dynamo to read
    torch._guards.CompileContext             what a thread that compiles is in
    torch._C._len_torch_dispatch_stack, torch.utils._python_dispatch.
    _get_current_dispatch_mode_stack         the dispatch modes of the thread
    torch._C._functorch.TransformType        the kinds of transforms
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import TransformType
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.jit import _trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_graph.callers import calling

dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
dispatch_depth: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many they are
# Before torch 2.14 there is a flag of the process instead.
FLAG_OF_THREAD: Callable[[], bool] | None = getattr(fx._symbolic_trace, "_get_is_fx_tracing", None)

set_flag: Callable[[bool], None] | None = getattr(
    torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", None
)  # None should this name go: then nothing is captured under a dispatch mode


def can_capture() -> bool:
    """Whether Dynamo may be entered. Inside a functorch transform (and, without `set_flag`, under a
    dispatch mode) it refuses, and would then never capture that code again. In forward-mode AD it
    does not refuse, but the functions that scale gradients have no forward derivative."""
    if set_flag is None and dispatch_depth():
        return False
    if forward_ad._current_level >= 0:
        return False
    return not in_a_transform()


def in_a_transform() -> bool:
    """Whether a functorch transform is active in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_exporting() -> bool:
    """Whether `torch.export` is at work. Dynamo 2.11 takes `torch.compiler.is_exporting()` for true
    in all that it captures."""
    return torch.compiler._is_exporting_flag


def is_compiling_here() -> bool:
    """Whether this thread is compiling, or `torch.export` is at work.
    `torch.compiler.is_compiling()` is true in other threads, too (torch 2.13)."""
    return CompileContext.try_get() is not None or is_exporting()


def is_estimate(module: nn.Module) -> bool:
    """Whether a call now would run a real module on fake tensors, under a mode of the user's: to
    estimate its memory, say. Anything kept of such a call would be fake in later ones."""
    if not dispatch_depth():
        return False
    if not any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes()):
        return False
    return not all(isinstance(p, FakeTensor) for p in module.parameters())


def wants_plain_code() -> bool:
    """Whether the model's own code is to run now, in its own precision: `torch.jit.trace`,
    `torch.export` or `make_fx` makes a program of it, and `torch.func.grad` under autocast fails in
    many a backward."""
    if torch._C._get_tracing_state() is not None:
        _compare_plain_code()
        return True
    if _own.is_checking or _is_fx_tracing():
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(i.key() == TransformType.Grad for i in stack)


class _OfThread(threading.local):
    is_checking = False  # whether `torch.jit.trace` compares with the model what it has traced


_own = _OfThread()


def _compare_plain_code() -> None:
    """Have `torch.jit.trace`, which is at work and gets plain code, compare its trace with plain
    code, so that a difference of precision is no complaint. Undone once it has."""
    check: Any = getattr(_trace, "_check_trace", None)
    if check is None or _own.is_checking or hasattr(check, "of_plain_code"):
        return

    @functools.wraps(check)
    def of_plain_code(*args: Any, **kwargs: Any) -> Any:
        _trace._check_trace = check
        before, _own.is_checking = _own.is_checking, True
        try:
            return check(*args, **kwargs)
        finally:
            _own.is_checking = before

    of_plain_code.of_plain_code = True  # type: ignore[attr-defined]
    _trace._check_trace = of_plain_code


def _is_fx_tracing() -> bool:
    tracing: Any = fx._symbolic_trace
    if FLAG_OF_THREAD is not None:
        return bool(FLAG_OF_THREAD())
    return tracing._is_fx_tracing_flag and _traces_here()


def _traces_here() -> bool:
    """Whether this thread traces. The flag is the process's before torch 2.14, and another thread
    may trace what it captures."""
    return any(f.f_code is fx.Tracer.trace.__code__ for f in calling(sys._getframe()))


def call_beside_traces(wrapped: Any) -> None:
    """Have what Dynamo wrapped not raise because another thread traces."""
    if FLAG_OF_THREAD is None:
        cells = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__, strict=True))
        cells["is_fx_symbolic_tracing"].cell_contents = _is_fx_tracing


def can_watch() -> bool:
    """Whether a model can be captured under a dispatch mode."""
    return set_flag is not None


class UnderDispatchModes:
    """Keeps captured graphs in use under a dispatch mode (a FLOP counter, say).

    Dynamo would run the user's code instead and mark it as never to be captured again. The
    modes see the operators of the emitted graphs. A class, as `contextlib.contextmanager` writes
    to each error that comes through, which the error's class may forbid.
    """

    def __enter__(self) -> None:
        stack = dispatch_modes() if set_flag is not None else []
        self._modes = [mode for mode in stack if not mode.ignore_compile_internals()]
        for mode in self._modes:
            mode.__dict__["ignore_compile_internals"] = lambda: True
        if self._modes and set_flag is not None:
            set_flag(False)

    def __exit__(self, *_: object) -> None:
        if self._modes and set_flag is not None:
            set_flag(True)
        for mode in self._modes:
            del mode.__dict__["ignore_compile_internals"]
