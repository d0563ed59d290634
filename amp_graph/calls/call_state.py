"""The state before a call, for when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from amp_graph.calls.call_path import Strategy
from amp_graph.calls.outside import OutsideWatch
from amp_graph.snapshots import ModelSnapshot


@dataclass(init=False, slots=True)
class CallState:
    """The state that a call of a model finds. One is made in each call, so without a Python
    `__init__`.

    begun, charged: see `CaptureBudget`.
    runs: how often a graph of the model ran in this thread.
    strategy: how the model is captured.
    records: whether autograd records.
    snapshot: the model's state, until a call has told what was converted.
    watch: the watch over this call; None if there is none, or the call turns out not to be
        captured.
    """

    begun: int
    charged: int
    runs: int
    strategy: Strategy
    records: bool
    snapshot: ModelSnapshot | None
    watch: OutsideWatch | None
