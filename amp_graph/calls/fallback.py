"""A model's own code, for what no graph stands for: under autocast if it can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from amp_graph.backend.record import Record
from amp_graph.calls.or_else import or_else
from amp_graph.errors import warn
from amp_graph.ir import Plan
from amp_graph.modes import BeginAt, under_autocast
from amp_graph.modules import Entry, Run, devices_of, has_backward_hooks, plain_code
from amp_graph.policy import Policy
from amp_graph.weak_references import weak_method


class Fallback:
    """A model's own code at one entry, and whether to run it. `record` has a plan for each reason
    to."""

    def __init__(self, entry: Entry, policy: Policy, record: Record):
        self._entry = entry
        self._policy = policy
        self._record = record
        self._told: dict[str, int] = {}  # plans of `_stand_in_told`, by reason
        self._uncaptured: tuple[Any, Run] | None = None  # see `run_uncaptured`

    def dtype(self) -> torch.dtype:
        """The low precision of the code. It has no boundary at which gradients could be scaled;
        where they would have to be, it is the one that does without."""
        dtype = self._policy.dtype_for(devices_of(self._entry.module))
        return torch.bfloat16 if self._policy.loss_scale_for(dtype) else dtype

    def stand_in(self, reason: str, met_sparse: bool = False) -> int:
        """Add a plan that stands for code without a graph, and return its index."""
        not_autocast = ""
        if met_sparse:
            not_autocast = "; products of its sparse tensors would add up in low precision"
        elif has_backward_hooks(self._entry.module):  # in no call of ours, that could mend an error
            not_autocast = "; hooks of modules would see gradients in low precision"
        fallback, autocast = f"{reason}{not_autocast}", not not_autocast
        return self._record.add(Plan(self.dtype(), fallback=fallback, autocast=autocast))

    def _stand_in_told(self, reason: str) -> int:
        """Do that for a reason that lasts, and tell it, both once."""
        if reason not in self._told:
            self._told[reason] = self.stand_in(reason)
            warn(f"{self._entry.name} {self._record.plans[self._told[reason]].otherwise}")
        return self._told[reason]

    def run_uncaptured(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code where it is never to be captured, for as long as the model is there."""
        if has_backward_hooks(self._entry.module):
            return self._plain()(*args, **kwargs)
        place = devices_of(self._entry.module), self.dtype()
        if self._uncaptured is None or self._uncaptured[0] != place:
            self._uncaptured = place, self._run(None)
        return self._uncaptured[1](*args, **kwargs)

    def run_told_of(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Run the code where it is never to be captured, and tell why, once."""
        self._stand_in_told(reason)
        return self.run_uncaptured(*args, **kwargs)

    def run(self, index: int) -> Run:
        """Return a function that runs the code where it cannot be captured; plan `index` stands for
        it."""
        if not self._record.plans[index].autocast:
            return self._plain()
        return self._run(index)

    def _run(self, index: int | None) -> Run:
        report = partial(weak_method(self.not_under_autocast), index)
        return self.run_or_else(index, self._plain(), report)

    def run_or_else(self, index: int | None, other: Run, report: Callable[[str], None]) -> Run:
        """Return a function that runs the code under autocast and, if that fails, `other` from then
        on. `index`: the plan that stands for the code, if any."""
        run = self.under_autocast(self._plain(), index, is_all=True)
        return or_else(run, lambda: other, report, self._entry.module, set())

    def _plain(self) -> Run:
        return plain_code(self._entry.module, self._entry.method)

    def of_copy(self, plain: Run) -> Run:
        """Return a function that runs a copy of the model that `nn.DataParallel` made, by its own
        code."""
        index = self._stand_in_told("copied by nn.DataParallel to each GPU in each call")
        if not self._record.plans[index].autocast:
            return plain
        report = partial(self.not_under_autocast, index)
        under = self.under_autocast(plain, index, is_all=True)
        return or_else(under, lambda: plain, report, None, set())

    def under_autocast(
        self, run: Run, index: int | None, is_all: bool, begin_at: BeginAt | None = None
    ) -> Run:
        """For code that plan `index` stands for, if any does. `is_all`: there is none captured."""
        devices, dtype = devices_of(self._entry.module), self.dtype()
        tell = None if index is None else partial(weak_method(self._tell), index, is_all)
        return under_autocast(run, devices, dtype, begin_at=begin_at, tell=tell)

    def _tell(self, index: int, is_all: bool, function: str) -> None:
        """Record that a custom function runs in float32; warn if all of the model was said to run
        under autocast."""
        said = self._record.in_float32(index, function)
        if said and is_all:
            warn(f"{self._what_is_not_captured()} runs {said}")

    def not_under_autocast(self, index: int | None, reason: str) -> None:
        what = self._what_is_not_captured()
        if index is None:
            warn(f"{what} runs in float32: autocast fails ({reason})")
        else:
            self._record.not_under_autocast(index, what, reason)

    def _what_is_not_captured(self) -> str:
        return f"code of {self._entry.name} that is not captured"
