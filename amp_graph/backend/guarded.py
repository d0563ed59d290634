"""The way back from an emitted graph to the captured one, for when its first run fails.

Private name of PyTorch used here:

    torch.utils._python_dispatch._disable_current_modes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from amp_graph.errors import NO_FAILURES, in_words
from amp_graph.modules import Run
from amp_graph.snapshots import RandomSnapshot, TensorSnapshot


class Guarded:
    """An emitted graph that has not yet shown that it runs.

    Invariant: a call returns what the emitted graph returns; if that fails, what the original
        returns, with every input at risk of being written, and the state of random numbers, as the
        original alone would have left it. After one success the emitted graph runs without a net,
        so that later errors are the user's own.
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
            given = TensorSnapshot([args[i] for i in self._at_risk])
        random = RandomSnapshot()
        try:
            result = self._emitted(*args)
        except NO_FAILURES:
            raise
        except Exception as error:
            reason = in_words(error)
        else:
            self._run = self._emitted
            return result
        given.restore()
        random.restore()
        result = self._original(*args)  # outside of the handler: its error is the user's own
        self._run = self._original
        self._report(reason)
        return result
