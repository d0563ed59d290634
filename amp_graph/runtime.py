"""What runs in place of a captured graph, and the ways back to the user's own code.

Private names of PyTorch used here; seen to work on 2.11, 2.13 and 2.15:

    torch.utils._python_dispatch._get_current_dispatch_mode_stack, _pop_mode_temporarily,
        _disable_current_modes
    torch.utils.checkpoint._StopRecomputationError
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError

from amp_graph.ir import Color
from amp_graph.modules import Kept, KeptRandomState, Run
from amp_graph.oplists import OpLists
from amp_graph.results import map_tensors

# What code raises that does not fail: memory ran out, or the second forward of a checkpoint has
# made all that its backward pass needs.
NO_FAILURES = torch.OutOfMemoryError, _StopRecomputationError


def autocast_devices() -> tuple[str, ...]:
    """The kinds of device that code may run under autocast on; one is PyTorch's accelerator, if it
    is registered by a package of its own."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu", "cuda", "mps", "xpu", *([accelerator.type] if accelerator else ()))


class ConversionWarning(UserWarning):
    """Part of a model runs otherwise than asked, with the same results as before conversion; or all
    of it slower than before."""


class Guarded:
    """An emitted graph that has not yet shown that it runs.

    Invariant: a call returns what the emitted graph returns, or, if that fails, what the
    original returns, with every input at risk of being written, and the state of random numbers,
    as the original alone would have left it. After one success the emitted graph runs without a
    net, so that an error is the user's own.
    """

    def __init__(
        self, emitted: Run, original: Run, at_risk: Sequence[int], report: Callable[[str], None]
    ):
        self._original = original
        self._at_risk = at_risk
        self._report = report
        self._emitted = emitted
        self._run = self._first_run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _first_run(self, *args: Any) -> Any:
        with _disable_current_modes():  # as that of selective checkpointing, which keeps results
            saved = [(i, args[i].detach().clone()) for i in self._at_risk]
        random = KeptRandomState()
        try:
            result = self._emitted(*args)
        except NO_FAILURES:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            self._run = self._emitted
            return result
        with torch.no_grad():
            for i, value in saved:
                if not torch.equal(args[i], value):
                    args[i].copy_(value)
        random.put_back()
        result = self._original(*args)  # outside of the handler: its error is the user's own
        self._run = self._original
        self._report(reason)
        return result


def without_autocast(run: Run, device_types: Iterable[str] | None = None) -> Run:
    """Shield `run`, whose casts are all written out, from autocast around it, on all devices unless
    some are given."""
    kinds = tuple(k for k in device_types or autocast_devices() if k != "meta")

    def shielded(*args: Any, **kwargs: Any) -> Any:
        enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        if not enabled:
            return run(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for kind in enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return run(*args, **kwargs)

    return shielded


def restoring_grad_mode(run: Run) -> Run:
    """`run`, which turns recording off and on again, raises in the mode that it was called in."""

    def restoring(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            return run(*args, **kwargs)
        except BaseException:
            torch.set_grad_enabled(before)
            raise

    return restoring


def under_autocast(run: Run, device_types: Iterable[str], dtype: torch.dtype) -> Run:
    """What runs where no graph could be rewritten: the original, with float32 results."""

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with _autocast(device_types, dtype):
            return map_tensors(back, run(*args, **kwargs))

    def back(value: torch.Tensor) -> torch.Tensor:
        return value.float() if value.dtype is dtype else value

    return autocast


def or_else(
    run: Run,
    make_other: Callable[[], Run],
    report: Callable[[str], None],
    model: torch.nn.Module | None,
    passed_on: set[type[Exception]],
) -> Run:
    """`run` until a call in which it raises: a RuntimeError, as operators do that do not take a
    dtype, a TypeError, as `Tensor.numpy` does, or whatever a library does that checks dtypes. That
    call and all later ones are run by the other one, unless it raises as well: then the error is
    the user's own, and so are all of its class, should it be one for such uses: it is added to
    those that are `passed_on`. If it is the first call, what it did to `model` is undone before."""
    chosen, has_run = run, False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen, has_run
        if chosen is not run:
            return chosen(*args, **kwargs)
        kept = None if has_run or model is None else Kept(model)
        try:
            result = run(*args, **kwargs)
        except Exception as error:
            if isinstance(error, (*NO_FAILURES, *passed_on)):
                raise
            kind = type(error)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            has_run = True
            return result
        if kept is not None:
            kept.put_back()
        other = make_other()
        try:
            result = other(*args, **kwargs)
        except Exception as error:
            if type(error) is kind and kind not in (RuntimeError, TypeError):
                passed_on.add(kind)
            raise
        chosen = other
        report(reason)
        return result

    return call


@contextlib.contextmanager
def _autocast(device_types: Iterable[str], dtype: torch.dtype) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in device_types:
            if kind != "meta":
                stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


class Outside(TorchDispatchMode):
    """Notes the allowed operators that run on float32 tensors outside of emitted graphs: in
    Python code that Dynamo left between two graphs, say a recurrent layer on packed sequences."""

    supports_higher_order_operators = True

    def __init__(self, lists: OpLists):
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.met_sparse = False
        self._lists = lists
        self._inside = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @staticmethod
    def breaks(error: Exception) -> bool:
        """Whether it may have been raised because there is a mode: by a model that makes a tensor
        of a subclass that is not for modes (`torch.nn.attention.bias`, torch 2.13)."""
        return "Creating a new Tensor subclass" in str(error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a graph. It leaves the stack of modes where it can: under one, in inference mode,
        operators are taken apart beneath autocast, which then does not see the parts."""
        modes = _get_current_dispatch_mode_stack()
        without = _pop_mode_temporarily if modes and modes[-1] is self else contextlib.nullcontext
        before, self._inside = self._inside, True
        try:
            with without():
                yield
        finally:
            self._inside = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._inside:
            listing = self._lists.lookup(func)
            if listing is not None and listing.color is Color.ALLOW and _has_float32(args):
                self.found.add(str(func))
            self.met_sparse = self.met_sparse or _has_sparse(args)
        return func(*args, **(kwargs or {}))


def _has_sparse(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in args)


def _has_float32(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype is torch.float32 for x in tree_leaves(args))


def warn(message: str) -> None:
    warnings.warn(message, ConversionWarning, stacklevel=3)
