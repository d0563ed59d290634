"""The state of a loss scale, from round to round.

A round is what lies between two training forwards with an optimizer step in between. The scale is
adjusted when a round ends, once for all optimizers that stepped in it, as `GradScaler.update` is.

The state that one round hands to the next is tensors that stay where they are and are written to,
so that a step captured as a CUDA graph goes on from the step replayed before it.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from amp_graph.errors import OverflowAbort
from amp_graph.gradients.engine import sent
from amp_graph.gradients.readback import Readback
from amp_graph.scaling.loss_scale import LossScale, ScaleOutcome, ScaleState, number
from amp_graph.watched import FirstNonfinite


class Rounds:
    """The rounds of a loss scale: the state that they began with, and what is known of this one.

    before: the state before this round. `before.scale` is written to when the round ends.
    is_pending: whether an optimizer has stepped in this round.
    first_pass: the first backward pass in it.
    watch: set while graphs are to be looked into: so many steps were skipped.
    """

    def __init__(self, config: LossScale):
        self.config, self.before = config, config.start()
        self.watch: FirstNonfinite | None = None
        self._skips = number(0.0)
        self._found_inf = number(0.0)  # of this round
        self._is_used = False  # whether an optimizer ever stepped
        self._in_a_row = Readback()  # how many steps were skipped
        self._begin()

    def _begin(self) -> None:
        self.is_pending = self._counts = False
        self.first_pass: int | None = None
        self._stepped_by: set[weakref.ref[object]] = set()

    @property
    def device(self) -> torch.device:
        """Where optimizers look for overflows."""
        return self._found_inf.device

    def has_stepped(self, optimizer: object) -> bool:
        return weakref.ref(optimizer) in self._stepped_by

    def step(self, found_inf: Tensor, optimizer: object, counts: bool) -> None:
        """Take note that an optimizer stepped (0) or had to skip (1). The round counts as a clean
        one if nothing overflowed and any of its steps `counts`."""
        self._stepped_by.add(weakref.ref(optimizer))
        self._is_used = True
        self._counts |= counts
        if self.is_pending:
            found_inf = torch.maximum(self._found_inf, sent(found_inf, self.device))
        elif self.device != found_inf.device:
            self._move(found_inf.device)
        self._found_inf.copy_(found_inf)
        self.is_pending = True

    @torch.inference_mode(False)
    def _move(self, device: torch.device) -> None:
        self.before = self.before.on(device)
        self._skips = sent(self._skips, device)
        self._found_inf = sent(self._found_inf, device)

    def end(self) -> None:
        """End a round in which there was a step: adjust the scale, and begin another."""
        self.config.adjust_(self.before, self._found_inf, self._counts)
        self._skips += self._found_inf
        self._begin()

    def watch_skips(self) -> None:
        """Have graphs looked into once too many steps in a row were skipped. Raises OverflowAbort
        if the next one was, too."""
        in_a_row, limit = self._in_a_row, self.config.abort_after
        in_a_row.follow(self.before.skipped, limit)
        if limit is None or in_a_row.latest < limit:
            self.watch = None
        elif self.watch is None:
            self.watch = FirstNonfinite()
        else:
            watched, self.watch = self.watch, None
            raise OverflowAbort(
                f"{in_a_row.latest} optimizer steps in a row were skipped because gradients "
                f"were not finite, the loss scale is down to {float(self.before.scale):g}; "
                f"{watched}. {watched.advice}; LossScale(abort_after=None) goes on regardless"
            )

    @property
    def state(self) -> ScaleState:
        """The state as it is once this round has ended."""
        if not self.is_pending:
            return self.before
        return self.config.adjust(self.before, self._found_inf, self._counts)

    def outcome(self, is_on: bool) -> ScaleOutcome:
        """Return the outcome to be told of; computes nothing."""
        found_inf = self._found_inf if self.is_pending else None
        told = self.before, self._skips, found_inf, self._counts
        return ScaleOutcome(self.config, *told, is_on, self._is_used)

    def go_on_from(self, config: LossScale, state: ScaleState) -> None:
        """Begin a round with this state; what this one found counts as far as skips go."""
        self.config, self.before = config, state.copy(self.device)
        self._in_a_row = Readback(math.inf)
        if self.is_pending:
            self._skips += self._found_inf
        self._begin()
