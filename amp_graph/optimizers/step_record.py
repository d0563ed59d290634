"""The record of an optimizer's steps under loss scales, and how it travels in the optimizer's
state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_graph.errors import CheckpointError
from amp_graph.gradients.engine import sent
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.scaling.loss_scale import load_state

STATE_KEY = "amp_graph"  # in an optimizer's state_dict
UNREAD = 256  # flags kept before they are summed up, so that not every step pays for a sum


@dataclass(frozen=True)
class StepCounts:
    """How often an optimizer stepped, and how often it had to skip."""

    stepped: int
    skipped: int


@dataclass(frozen=True)
class _Saved:
    """The content of a checkpoint, as far as it can be read before the scales are there."""

    scales: list[Any]
    steps: int
    skipped: int

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> _Saved:
        found = cls(list(saved["scales"]), int(saved["steps"]), int(saved["skipped"]))
        if not 0 <= found.skipped <= found.steps:
            raise ValueError(f"{found.skipped} of {found.steps} steps skipped")
        return found


class StepRecord:
    """Counts an optimizer's steps, and saves and loads the counts with its scales. An object that
    is no Optimizer has nothing to save or load them by.

    find_scales: returns the optimizer's scales, the oldest first.
    """

    def __init__(self, optimizer: Optimizer, find_scales: Callable[[Optimizer], list[GraphScale]]):
        self.overflowed: bool | Tensor = False  # the last step; a tensor if the host does not know
        self._find_scales = find_scales
        self._steps = 0
        self._skipped = 0
        self._unread: list[Tensor] = []  # flags of steps that are not in that count
        self._loading: Callable[[], None] | None = None
        self._waiting: _Saved | None = None  # for scales, which a model gets when it first runs
        if not isinstance(optimizer, Optimizer):
            return
        # A subclass that calls no `__init__` lacks what hooks are kept in. `__setstate__` makes
        # that, and changes the class, so that its other objects lack more.
        for name, hooks in vars(SGD([torch.zeros(1)], lr=0.0)).items():
            if name.endswith("_hooks"):
                optimizer.__dict__.setdefault(name, type(hooks)())
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._check_loaded)
        optimizer.register_load_state_dict_post_hook(self._apply_loaded)

    def add(self, overflowed: bool | Tensor) -> None:
        """Take note of a step."""
        self._steps += 1
        self.overflowed = overflowed
        if isinstance(overflowed, Tensor):
            self._unread.append(overflowed)
            if len(self._unread) == UNREAD:
                self._unread = [_sum(self._unread)]
        else:
            self._skipped += overflowed

    @property
    def has_stepped(self) -> bool | Tensor:
        """Whether the last step was not skipped."""
        found = self.overflowed
        return found.logical_not() if isinstance(found, Tensor) else not found

    @property
    def counts(self) -> StepCounts:
        skipped = self._read_skipped()
        return StepCounts(self._steps - skipped, skipped)

    def _read_skipped(self) -> int:
        """How many steps were skipped; waits for the device."""
        if self._unread:
            self._skipped += int(_sum(self._unread))
            self._unread.clear()
        return self._skipped

    @property
    def is_waiting(self) -> bool:
        """Whether a checkpoint was loaded that holds scales which are not there yet."""
        return self._waiting is not None

    def begin_scale(self, optimizer: Optimizer, scale: GraphScale) -> None:
        """Have a scale go on from a checkpoint that was loaded before there was any."""
        if self._waiting is None:
            return
        saved, position = self._waiting.scales, self._find_scales(optimizer).index(scale)
        if position + 1 >= len(saved):
            self._waiting = None
        if position < len(saved):
            _loading([scale], [saved[position]])()

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        saved = [scale.state_dict() for scale in self._find_scales(optimizer)]
        if self._waiting is not None:
            saved += self._waiting.scales[len(saved) :]
        if saved:
            counts = {"steps": self._steps, "skipped": self._read_skipped()}
            state[STATE_KEY] = {"scales": saved, **counts}

    def _check_loaded(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Raise CheckpointError before anything is changed."""
        saved, scales = state.get(STATE_KEY), self._find_scales(optimizer)
        self._loading = None
        if saved is None:
            return
        try:
            found = _Saved.of(saved)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"'{STATE_KEY}' in the optimizer's state is damaged or foreign ({error!r}); "
                f"without that key the loss scale starts anew"
            ) from None
        if scales and len(found.scales) != len(scales):
            raise CheckpointError(
                f"the optimizer's state has {len(found.scales)} loss scales, but {len(scales)} "
                f"models with one are converted; convert all models before loading"
            )
        load_scales = _loading(scales, found.scales if scales else [])

        def load() -> None:
            self._steps, self._skipped = found.steps, found.skipped
            self._unread.clear()
            self._waiting = None if scales else found
            load_scales()

        self._loading = load

    def _apply_loaded(self, optimizer: Optimizer) -> None:
        if self._loading is not None:
            self._loading()


def _loading(scales: Sequence[GraphScale], states: Sequence[Any]) -> Callable[[], None]:
    """Return a function that has scales go on from these states. Raises CheckpointError."""
    pairs = zip(scales, states, strict=True)
    loaded = [(scale, *load_state(scale.config, state)) for scale, state in pairs]

    def load() -> None:
        for scale, config, state in loaded:
            scale.go_on_from(config, state)

    return load


def _sum(flags: Sequence[Tensor]) -> Tensor:
    """Sum flags up, which are on several devices if a model was moved meanwhile."""
    return torch.stack([sent(flag, flags[-1].device) for flag in flags]).sum()
