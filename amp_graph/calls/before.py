"""What is kept of how things were before a call, for when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from amp_graph.calls.outside import Outside
from amp_graph.calls.ways import Way
from amp_graph.kept import Kept


@dataclass(init=False, slots=True)
class Before:
    """What a call of a model finds. It is made in each, so without a call of Python's.

    begun, charged: see `Frames`.
    runs: how often a graph of the model ran in this thread.
    way: how the model is captured.
    records: whether autograd does.
    kept: of the model, until a call of it has told of what was converted.
    watch: what watches the call; none any more if it turns out not to be captured.
    """

    begun: int
    charged: int
    runs: int
    way: Way
    records: bool
    kept: Kept | None
    watch: Outside | None
