"""The loss scale of backward passes that nobody watches over.

An optimizer that finds an overflow skips its step, and the scale is lowered. Where there is none to
do so, because none is known, or because what is wanted are gradients of inputs (adversarial
examples, saliency maps, Langevin dynamics), the scale of a pass is no larger than the gradient that
comes in first allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_graph.boundary.crossing import has_left
from amp_graph.boundary.scale import ChosenNumbers, ScaleInputs
from amp_graph.errors import AmpGraphError
from amp_graph.gradients.checked_gradients import CheckedGradients
from amp_graph.gradients.engine import OUTSIDE, backward_pass, sent
from amp_graph.gradients.transforms import unbatched
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.watched import FirstNonfinite

PEAK = 1.0  # what the largest incoming gradient is brought to
PEAK_AGAIN = 2.0**6  # where what is differentiated again begins: 2^10 times as much is finite
# Backward passes that may begin before the first of them ends, inside of it or in other threads: on
# a busy machine one that waits for its turn is overtaken by dozens.
PASSES = 1024
LOOKED_AT = 64  # autograd nodes behind the inputs of a call

Factors = tuple[Tensor, Tensor]


def are_wanted(inputs: Sequence[Tensor]) -> bool:
    """Whether gradients of inputs go on to a tensor that is no parameter, perhaps through what a
    script did to it first. An input that comes from a graph, or from a long computation, is a part
    of a model, whose optimizer will look at its gradients."""
    if any(x.is_leaf and not isinstance(x, Parameter) for x in inputs):
        return True
    behind = deque[Any](x.grad_fn for x in inputs if not x.is_leaf)
    for _ in range(LOOKED_AT):
        if not behind:
            break
        node = behind.popleft()
        if not isinstance(getattr(node, "variable", None), Parameter | None):
            return True
        if not has_left(node):
            behind.extend(before for before, _ in node.next_functions if before is not None)
    return False


class GuardedScale(Protocol):
    """The loss scale where an optimizer's guard skips steps that overflowed."""

    checked: CheckedGradients

    @property
    def config(self) -> LossScale: ...
    @property
    def watch(self) -> FirstNonfinite | None: ...
    def is_guarded(self) -> bool:
        """Whether an optimizer will skip a step if gradients of a pass that runs now overflow."""

    def factors_on(self, device: torch.device) -> Factors: ...
    def note_parameters(self, parameters: Iterable[Tensor]) -> None: ...


class CautiousScale:
    """A loss scale that is chosen per backward pass. Gradients that go out are divided by what
    those that came in were multiplied by, also if an optimizer turns up meanwhile.

    chosen: S and 1/S, by pass and device; empty in most trainings.
    """

    def __init__(self) -> None:
        self.chosen: dict[int, dict[torch.device, Factors]] = {}
        self._numbers = ChosenNumbers()

    def factor(
        self,
        scale: GuardedScale,
        gradient: Tensor,
        create_graph: bool,
        double_backward: bool = False,
    ) -> Tensor:
        """Return S for a gradient that comes into a backward pass.

        The last pass of a penalty is trained on and takes the guarded scale, if there is a guard;
        gradients of earlier passes are seen by the script, and take the cautious one. Where a pass
        is differentiated again, `gradient` is already multiplied by the S of that pass.
        """
        running = backward_pass()
        if running != OUTSIDE and running not in self.chosen:
            if len(self.chosen) >= PASSES:
                self.chosen.pop(next(iter(self.chosen)), None)  # ended long ago
            chosen = scale.factors_on(gradient.device)
            is_guarded = scale.is_guarded()
            if create_graph and is_guarded:
                # Gradients as large meet what comes into a double backward.
                met = gradient * PEAK_AGAIN if double_backward else gradient
                # At least 1: it is the last pass that the guard lowers S for.
                chosen = bounded(chosen[0].clamp(min=1.0), met, PEAK_AGAIN, scale.config)
            elif not (double_backward and is_guarded):
                chosen = bounded(chosen[0], gradient, PEAK, scale.config)
            # Another device's thread may have chosen meanwhile: one scale for all of a pass.
            self.chosen.setdefault(running, {gradient.device: chosen})
        return self._factors_on(scale, gradient.device)[0]

    def inverse(self, scale: GuardedScale, device: torch.device) -> Tensor:
        """Return 1/S."""
        return self._factors_on(scale, device)[1]

    def inputs_on(self, scale: Any, devices: Sequence[torch.device]) -> ScaleInputs:
        """Return S for a graph that reads it itself. A graph that a checkpoint runs again has S at
        once: the gradient that it is run for is there.
        """
        inputs = self._numbers.for_call(scale, devices)
        if self.rules():
            for device, memory in zip(devices, inputs.chosen, strict=True):
                memory.copy_(self._factors_on(scale, device)[0])
        return inputs

    def rules(self) -> bool:
        """Whether a scale was chosen for the pass that is running."""
        return bool(self.chosen) and backward_pass() in self.chosen

    def forget(self) -> None:
        """Forget passes that ended."""
        self.chosen.clear()

    def _factors_on(self, scale: GuardedScale, device: torch.device) -> Factors:
        chosen = self.chosen.get(backward_pass()) if self.chosen else None
        if chosen is None and self.chosen and backward_pass() != OUTSIDE:
            raise AmpGraphError(
                "gradients leave a converted model in a backward pass in which none came in: an "
                "earlier pass stored them inside of it (zero-bubble pipelining). Use bfloat16, or "
                "Policy(loss_scale=None) with a GradScaler"
            )
        if chosen is None:
            return scale.factors_on(device)
        if device not in chosen:
            elsewhere = sent(next(iter(chosen.values()))[0], device)
            chosen[device] = elsewhere, elsewhere.reciprocal()
        return chosen[device]


def bounded(guarded: Tensor, gradient: Tensor, highest: float, config: LossScale) -> Factors:
    """Return a scale, a power of 2 that rounds nothing, at which gradients as large as this one
    stay below `highest`.

    The gradient of a single number, a loss times some weight, says little about the gradients of
    what it was made from, so these are not made smaller for it. A gradient that is all zero says
    nothing.
    """
    least = max(config.floor, 1.0) if gradient.dim() == 0 else config.floor
    peak = torch.ones_like(guarded)
    values = unbatched(gradient)  # one scale for all of a batch
    if values.numel():
        values = values if values.layout is torch.strided else values._values()
        found = values.detach().abs().amax().float()
        peak = torch.where(found == 0, peak, found)
    enough = torch.exp2(torch.floor(torch.log2(highest / peak)))
    within = enough.clamp(least, config.ceiling)
    scale = torch.fmin(guarded, within)
    return scale, scale.reciprocal()


@dataclass(frozen=True)
class ExposedScale:
    """The scale of calls whose gradients of inputs are wanted."""

    scale: GuardedScale
    caution: CautiousScale

    @property
    def checked(self) -> CheckedGradients:
        return self.scale.checked

    @property
    def watch(self) -> FirstNonfinite | None:
        return self.scale.watch

    def note_parameters(self, parameters: Iterable[Tensor]) -> None:
        self.scale.note_parameters(parameters)

    def spill_on(self, device: torch.device) -> Tensor | None:
        return None

    def factor(self, gradient: Tensor, create_graph: bool, double_backward: bool = False) -> Tensor:
        return self.caution.factor(self.scale, gradient, create_graph, double_backward)

    def inverse(self, device: torch.device) -> Tensor:
        return self.caution.inverse(self.scale, device)

    def inputs_on(self, devices: Sequence[torch.device]) -> ScaleInputs:
        return self.caution.inputs_on(self, devices)
