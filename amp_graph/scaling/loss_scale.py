"""The loss scale as a pure state machine: its state, and the state after an optimizer step.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, in the dynamic form that
`torch.amp.GradScaler` made usual, with the bounds that it lacks: its scale can reach exactly 0
(seen in torch 2.13), after which the next finite step writes NaN into the parameters.

Private names of PyTorch used here:

    torch._amp_update_scale_    the rule of GradScaler, on the device
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_graph.errors import CheckpointError, PolicyError
from amp_graph.gradients.engine import sent


class ScaleState(NamedTuple):
    """A loss scale at one moment: 0-dimensional tensors on one device.

    scale: what gradients are multiplied by; float32.
    clean: steps since the scale last changed or a step was skipped; int32.
    skipped: steps skipped in a row; float32.
    """

    scale: Tensor
    clean: Tensor
    skipped: Tensor

    @classmethod
    def of(cls, scale: float, clean: int, skipped: int) -> ScaleState:
        return cls(number(scale), number(clean, torch.int32), number(skipped))

    @torch.inference_mode(False)
    def copy(self, device: torch.device | None = None) -> ScaleState:
        """A state that shares no memory with this one, on another device if one is given."""
        copies = (sent(value, device or value.device).clone() for value in self)
        return ScaleState(*copies)

    def on(self, device: torch.device) -> ScaleState:
        return self if self.scale.device == device else self.copy(device)


@torch.inference_mode(False)
def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A 0-dimensional tensor on the CPU that may be written to, wherever and in whatever context
    the model is converted."""
    return torch.tensor(value, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class LossScale:
    """How a loss scale starts and changes.

    init_scale, growth_factor, backoff_factor, growth_interval: as in `torch.amp.GradScaler`: the
        scale is multiplied by `backoff_factor` when gradients overflow, and by `growth_factor`
        after `growth_interval` steps without.
    floor, ceiling: the scale stays between them.
    hysteresis: how many overflows in a row it takes to back off.
    abort_after: after so many skipped steps in a row the next one is looked at, operator by
        operator; if it is skipped too, the model's next call raises OverflowAbort, which names the
        first whose value or gradient was not finite. None: never.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    hysteresis: int = 1
    abort_after: int | None = 500

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "floor", "ceiling"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise PolicyError(f"LossScale: {name} must be a positive number, not {value!r}")
        if not self.floor <= self.init_scale <= self.ceiling:
            raise PolicyError(
                f"LossScale: init_scale {self.init_scale:g} must lie between floor "
                f"{self.floor:g} and ceiling {self.ceiling:g}"
            )
        if self.floor < 2.0**-126 or self.ceiling > 2.0**126:
            raise PolicyError(
                f"LossScale: floor {self.floor:g} and ceiling {self.ceiling:g} must lie between "
                f"2^-126 and 2^126, whose reciprocals float32 holds"
            )
        if self.growth_factor < 1:
            raise PolicyError(f"LossScale: growth_factor {self.growth_factor:g} is below 1")
        if self.backoff_factor > 1:
            raise PolicyError(f"LossScale: backoff_factor {self.backoff_factor:g} is above 1")
        for name in ("growth_interval", "hysteresis", "abort_after"):
            value = getattr(self, name)
            if not (value is None and name == "abort_after") and not _is_count(value):
                raise PolicyError(f"LossScale: {name} must be a count above 0, not {value!r}")

    @classmethod
    def static(cls, scale: float) -> LossScale:
        """A scale that never changes (NVCaffe's global_grad_scale)."""
        return cls(scale, 1.0, 1.0, floor=scale, ceiling=scale)

    def start(self) -> ScaleState:
        return ScaleState.of(self.init_scale, 0, 0)

    def adjust(self, state: ScaleState, found_inf: Tensor, counts: bool = True) -> ScaleState:
        """The state after an optimizer step; `found_inf` is 1 if it was skipped, else 0. Unless it
        `counts`, a step that was not skipped leaves the state as it is.

        Works on the state's device without waiting for it.
        """
        adjusted = state.copy()
        self.adjust_(adjusted, found_inf, counts)
        return adjusted

    def adjust_(self, state: ScaleState, found_inf: Tensor, counts: bool) -> None:
        """Adjust the state in place, as `adjust` does."""
        before = state.scale.clone() if self.hysteresis > 1 else state.scale
        torch._amp_update_scale_(
            state.scale,
            state.clean,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval if counts else _NEVER,
        )
        if counts:
            torch.addcmul(found_inf, state.skipped, found_inf, out=state.skipped)
        else:
            state.clean.add_(found_inf.int() - 1)
            state.skipped.add_(found_inf)
        if self.hysteresis > 1:
            is_waiting = (found_inf != 0) & (state.skipped < self.hysteresis)
            torch.where(is_waiting, before, state.scale, out=state.scale)
        state.scale.clamp_(self.floor, self.ceiling)


@dataclass(frozen=True)
class ScaleOutcome:
    """The outcome of a loss scale, to be told when it is gone: its own tensors, read only when
    asked for, as reading waits for the device.

    state: the state in which its last round began.
    skipped: in how many rounds before that one a step was skipped.
    found_inf, counts: what optimizers found in that round, as for `LossScale.adjust`; None if none
        stepped in it.
    is_on: whether gradients were scaled.
    is_used: whether any optimizer ever stepped.
    """

    config: LossScale
    state: ScaleState
    skipped: Tensor
    found_inf: Tensor | None
    counts: bool
    is_on: bool
    is_used: bool

    @property
    def skips(self) -> int:
        """Rounds in which an optimizer skipped its step; waits for the device."""
        return int(self.skipped if self.found_inf is None else self.skipped + self.found_inf)

    def get_scale(self) -> float:
        """The loss scale as a number, 1 if it is off; waits for the device."""
        if not self.is_on:
            return 1.0
        if self.found_inf is None:
            return float(self.state.scale)
        return float(self.config.adjust(self.state, self.found_inf, self.counts).scale)


_NEVER = 2**31 - 1  # steps
FACTOR_KEYS = ("growth_factor", "backoff_factor", "growth_interval")


def save_state(config: LossScale, state: ScaleState) -> dict[str, Any]:
    """Return a dict of plain numbers that `GradScaler.load_state_dict` takes, too."""
    scale, clean, skipped = (float(value) for value in state)
    saved = {"scale": scale, "_growth_tracker": int(clean), "skipped_in_a_row": int(skipped)}
    return saved | {key: getattr(config, key) for key in FACTOR_KEYS}


def load_state(config: LossScale, saved: Any) -> tuple[LossScale, ScaleState]:
    """Read what `save_state` or `GradScaler.state_dict` saved. Raises CheckpointError.

    The factors are taken from what was saved, as GradScaler does. The bounds stay, and a scale that
    has grown beyond them, for which GradScaler has none, goes on from there.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"not the state of a loss scale: {saved!r}")
    missing = [k for k in ("scale", "_growth_tracker", *FACTOR_KEYS) if k not in saved]
    if missing:
        raise CheckpointError(f"the state of the loss scale lacks {', '.join(missing)}")
    scale, clean = saved["scale"], saved["_growth_tracker"]
    skipped = saved.get("skipped_in_a_row", 0)
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise CheckpointError(f"the saved loss scale is {scale!r}, not a positive number")
    for key, value in (("_growth_tracker", clean), ("skipped_in_a_row", skipped)):
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise CheckpointError(f"the state of the loss scale has {key} {value!r}")
    kept = {f.name: getattr(config, f.name) for f in fields(config)}
    try:
        loaded = LossScale(**kept | {key: saved[key] for key in FACTOR_KEYS})
    except (PolicyError, TypeError) as error:
        raise CheckpointError(f"the state of the loss scale makes no sense: {error}") from None
    within = min(max(scale, loaded.floor), loaded.ceiling)
    return loaded, ScaleState.of(within, clean, skipped)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
