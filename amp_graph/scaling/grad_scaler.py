"""Explicit loss scaling, for scripts written that way.

`GradScaler` has the methods of `torch.amp.GradScaler` and the state machine of `LossScale`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import AmpGraphError, in_brief
from amp_graph.gradients.engine import any_of
from amp_graph.gradients.found_inf import found_inf, parameters_of
from amp_graph.scaling.loss_scale import LossScale, ScaleState, load_state, save_state
from amp_graph.steps.closures import closure_of


class GradScaler:
    """Scale losses by hand: `torch.amp.GradScaler` with a floor, a ceiling, hysteresis.

        scaler = amp_graph.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)      # optional, to clip
        scaler.step(optimizer)          # skipped if gradients overflowed
        scaler.update()

    `device` is accepted for compatibility; scale and checks live where the gradients are. Further
    keyword arguments are those of `LossScale`; the bounds make room for `init_scale`.
    """

    def __init__(
        self,
        device: Any = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **bounds: Any,
    ):
        if isinstance(init_scale, (int, float)):
            bounds.setdefault("floor", min(LossScale.floor, init_scale))
            bounds.setdefault("ceiling", max(LossScale.ceiling, init_scale))
        self._config = LossScale(
            init_scale, growth_factor, backoff_factor, growth_interval, **bounds
        )
        self._state = self._config.start()
        self._enabled = enabled
        # By the ids of those unscaled since the last update, which are kept for as long.
        self._found: dict[int, tuple[Optimizer, Tensor]] = {}
        self._stepped: set[int] = set()

    def __repr__(self) -> str:
        return f"<GradScaler: {self.get_scale():g}{'' if self._enabled else ', disabled'}>"

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of an iterable of losses, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self._state_on(outputs.device).scale
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            scaled = [self.scale(value) for value in outputs]
            return scaled if isinstance(outputs, list) else tuple(scaled)
        raise AmpGraphError(f"GradScaler.scale takes tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place."""
        if not self._enabled:
            return
        if not hasattr(optimizer, "param_groups"):
            raise AmpGraphError(f"GradScaler steps optimizers, not {in_brief(optimizer)}")
        if id(optimizer) in self._found:
            raise AmpGraphError("unscale_() was called for this optimizer since the last update()")
        inverse = self._state.scale.reciprocal()
        self._found[id(optimizer)] = optimizer, found_inf(parameters_of(optimizer), inverse)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless its gradients overflowed; return what its `step` returns."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if closure_of(args, kwargs) is not None:
            raise AmpGraphError(
                "GradScaler.step() takes no closure, whose gradients nobody would unscale. Without "
                "a scaler, optimizer.step(closure) is guarded for converted models"
            )
        if id(optimizer) in self._stepped:
            raise AmpGraphError("step() was called for this optimizer since the last update()")
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        _, found = self._found[id(optimizer)]
        return None if bool(found) else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale, once all optimizers have stepped; or set it."""
        if not self._enabled:
            return
        if new_scale is not None:
            if not self._config.floor <= float(new_scale) <= self._config.ceiling:
                raise AmpGraphError(f"update() sets a scale beyond the bounds: {new_scale}")
            value = torch.tensor(float(new_scale), device=self._state.scale.device)
            self._state = self._state._replace(scale=value)
        elif not self._found:
            raise AmpGraphError("update() before any step(): no gradients were checked")
        else:
            found = any_of([found for _, found in self._found.values()], self._state.scale.device)
            self._state = self._config.adjust(self._state, found)
        self._found, self._stepped = {}, set()

    def get_scale(self) -> float:
        return float(self._state.scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._config.growth_factor

    def get_backoff_factor(self) -> float:
        return self._config.backoff_factor

    def get_growth_interval(self) -> int:
        return self._config.growth_interval

    def set_growth_factor(self, new_factor: float) -> None:
        self._config = replace(self._config, growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        self._config = replace(self._config, backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        self._config = replace(self._config, growth_interval=new_interval)

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state, which `torch.amp.GradScaler.load_state_dict` takes too."""
        return save_state(self._config, self._state) if self._enabled else {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from a state saved here or by torch.amp.GradScaler. Raises CheckpointError."""
        if self._enabled:
            self._config, self._state = load_state(self._config, state_dict)

    def _state_on(self, device: torch.device) -> ScaleState:
        self._state = self._state.on(device)
        return self._state


@contextlib.contextmanager
def scale_loss(loss: Tensor, optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[Tensor]:
    """Apex's `with scale_loss(loss, optimizer) as scaled: scaled.backward()`.

    The graphs of converted models scale by themselves, so the loss is handed out as it is; after
    the block, as with Apex, gradients are true, and the optimizer skips the step on overflow. For a
    model that is not converted nothing is scaled: see `GradScaler`.
    """
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if not isinstance(each, Optimizer):
            raise AmpGraphError(f"scale_loss takes optimizers, not {type(each).__name__}")
    yield loss
