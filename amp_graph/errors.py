"""The exceptions, warnings and lines a user may see, and the exceptions that mean no failure.

Private name of PyTorch used here:

    torch.utils.checkpoint._StopRecomputationError
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from amp_graph.callers import depth_of_user, place


class AmpGraphError(Exception):
    """Base of all errors that this package raises on purpose."""


class ListError(AmpGraphError):
    """An operator list is malformed, or names something it should not."""


class PolicyError(AmpGraphError):
    """A policy asks for something contradictory or impossible."""


class PlanError(AmpGraphError):
    """A saved plan cannot be read, or does not belong to the model."""


class CheckpointError(AmpGraphError):
    """A saved state is damaged, or is not one of this package."""


# Wrong arguments: raised wherever they show, and never a reason to run something else.
MISTAKES = (PolicyError, PlanError, CheckpointError)


class CaptureError(AmpGraphError):
    """A model could not be captured as a graph."""


class VerifyError(AmpGraphError):
    """A rewritten graph failed one of the checks it must pass."""


class OverflowAbort(AmpGraphError):
    """Too many optimizer steps in a row were skipped, because gradients were not finite."""


# Errors of code that does not fail: memory ran out, or the second forward of a checkpoint has made
# all that its backward pass needs.
NO_FAILURES = torch.OutOfMemoryError, _StopRecomputationError


class DerivativeError(AmpGraphError, RuntimeError):
    """A compiled graph was asked for a derivative that it does not have. Scripts catch PyTorch's
    RuntimeError, which this is, too."""


class ConversionWarning(UserWarning):
    """Part of a model runs otherwise than asked, with the same results as before conversion; or all
    of it slower than before."""


_told: set[str] = set()
_tell: list[Callable[[str], None]] = []


def warn(message: str, once_about: str = "") -> None:
    """Warn at the user's line. A warning that is the same for all models is given `once_about` a
    subject."""
    if once_about in _told:
        return
    if once_about:
        _told.add(once_about)
    if _tell:
        _tell[-1](message)
    else:
        warnings.warn(message, ConversionWarning, stacklevel=depth_of_user(sys._getframe()) + 1)


@contextlib.contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Print messages instead of warning: for a script that does not know of this package, and may
    turn every warning into an error, or count them."""
    _tell.append(tell)
    try:
        yield
    finally:
        _tell.remove(tell)


def say(*lines: str, of: str = "") -> None:
    """Print lines on standard error, to whoever runs a script. A service or a program without a
    window may have none (`sys.stderr` is None), for which `print` would take standard output. `of`:
    which process says so."""
    if sys.stderr is not None:
        begin = f"amp_graph: {of}: " if of else "amp_graph: "
        sys.stderr.write("".join(f"{begin}{line}\n" for line in lines))


def line_of_user() -> str:
    """Return the line of the user's code that is running: "train.py:12"."""
    frame = sys._getframe(depth_of_user(sys._getframe()))
    return place(frame.f_code.co_filename, frame.f_lineno)


def in_words(error: BaseException) -> str:
    """Return an error's class and message, in one line."""
    return ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))


def in_brief(value: Any) -> str:
    """Return a short form of a wrong argument, for a message about it."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 40 else f'{text[:37]}...'}"


def did_you_mean(name: Any, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about a name that is not among the choices: a close one, if
    any."""
    close = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
