"""Traces that writing to parameters leaves, by which they may have changed.

Seen are

- versions: in-place operators, `load_state_dict`, optimizers that are not fused raise them;
- other memory: `parameter.data = x`. Where it begins `GraphWeights` asks; here, whether what was
  read is still there, or was freed and has given way to other memory in its place;
- steps of a `torch.optim.Optimizer`, whatever it does in them, by the hooks PyTorch has for all;
- another stream: what another one was given to write need not be there yet.

Not seen, outside of an optimizer's step, are writes in place through `parameter.data`, by
collectives, by other processes, and by kernels that raise no version. After one of those,
`torch.autograd.graph.increment_version(parameters)` leaves the trace. What a CUDA graph replays
leaves none either, so that from the first capture on everything may have changed.

The steps of all optimizers are followed for all models: they are all that is module-level here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.gradients.engine import current_streams, is_captured
from amp_graph.gradients.found_inf import parameters_of
from amp_graph.gradients.memory import Memories
from amp_graph.steps.hooks import hear_steps, steps_around
from amp_graph.uncaptured import not_compiled


class ChangeTracker:
    """The traces of some parameters, as they were last looked at."""

    def __init__(self) -> None:
        _steps.watch()
        self._seen: Any = None
        self._memories = Memories()

    def look(self, parameters: Sequence[Tensor], versions: Sequence[int]) -> Any:
        """Return the traces that these parameters show now."""
        devices = {p.device for p in parameters}
        _steps.note_captures(devices)
        return _steps.count, current_streams(devices), [*versions]

    def are_new(self, seen: Any) -> bool:
        """Whether the parameters may have changed since the traces that were kept."""
        is_same = seen == self._seen and self._memories.are_alive()
        return not is_same or _steps.may_be_unseen()

    def keep(self, seen: Any, parameters: Sequence[Tensor]) -> None:
        """Keep the traces of parameters that were read since: to another thread they are new until
        then."""
        memories = Memories()
        memories.add(parameters)
        self._memories, self._seen = memories, seen


class _Steps:
    """The steps of all optimizers."""

    def __init__(self) -> None:
        self.count = 0
        self.are_replayed = False
        self._unheard: int | None = None  # of those under way, how many began before all are heard
        # How many steps each is in the middle of: one may call that of its base class.
        self._under_way: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        if self._unheard is None:
            hear_steps(before=self._begins, after=self._ends)
            # A model may first be called by a closure.
            self._unheard = steps_around(sys._getframe(), enough=None)

    def note_captures(self, devices: Iterable[torch.device]) -> None:
        """A call or a step on these may be captured as a CUDA graph, and replayed from then on."""
        self.are_replayed |= any(map(is_captured, devices))

    def may_be_unseen(self) -> bool:
        """Whether parameters may be stepped by replays, or just now by what calls a closure."""
        return self.are_replayed or bool(self._under_way or self._unheard)

    @not_compiled
    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.count += 1
        # If a step raises, its optimizer stays until the next: that costs time alone.
        depth = self._under_way.get(optimizer, 0)
        is_inside = depth > 0 and steps_around(sys._getframe(), enough=2) > 1
        self._under_way[optimizer] = depth + 1 if is_inside else 1
        self.note_captures({p.device for p in parameters_of(optimizer)})

    @not_compiled
    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.count += 1
        depth = self._under_way.pop(optimizer, 0)
        if depth > 1:
            self._under_way[optimizer] = depth - 1
        elif not depth and self._unheard:
            self._unheard -= 1


_steps = _Steps()
