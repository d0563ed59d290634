"""The loss scale inside the graphs of one converted model, and by whom it is watched over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from amp_graph.boundary.scale import ScaleInputs
from amp_graph.gradients.checked_gradients import CheckedGradients
from amp_graph.gradients.engine import OUTSIDE, backward_pass, is_captured, sent
from amp_graph.gradients.owned_parameters import OwnedParameters
from amp_graph.scaling.cautious_scale import CautiousScale, ExposedScale, Factors, are_wanted
from amp_graph.scaling.explicit_scalers import is_grad_scaler_around
from amp_graph.scaling.loss_scale import (
    LossScale,
    ScaleOutcome,
    ScaleState,
    load_state,
    save_state,
)
from amp_graph.scaling.rounds import Rounds
from amp_graph.scaling.spills import LeftOver, Spills
from amp_graph.steps.inner_passes import note_backward, note_forward
from amp_graph.watched import FirstNonfinite

_serials = count()


class GraphScale:
    """The loss scale inside the graphs of one converted model.

    parameters: the method that returns the model's parameters; it is held weakly.
    has_optimizer: whether there is one, which would skip steps; else nobody would see an overflow.
    driven_by_grad_scaler: whether the script scales its losses by itself.
    """

    def __init__(self, config: LossScale, parameters: Callable[[], Iterable[Tensor]]):
        self.serial = next(_serials)  # checkpoints list scales in order of creation
        self.parameters = OwnedParameters(parameters)
        self.checked, self.spills = CheckedGradients(), Spills()
        self.driven_by_grad_scaler = self.has_optimizer = False
        self._rounds = Rounds(config)
        self._looked_around = False
        self._is_stepped = False  # whether its own parameters ever were
        self._factors: dict[torch.device, Factors] = {}
        self._alone, self._exposed = CautiousScale(), CautiousScale()
        self._is_exposed = self._was_in_training = self._is_in_evaluation = False

    @property
    def config(self) -> LossScale:
        return self._rounds.config

    @property
    def watch(self) -> FirstNonfinite | None:
        return self._rounds.watch

    @property
    def first_pass(self) -> int | None:
        """The first backward pass of this round."""
        return self._rounds.first_pass

    def __repr__(self) -> str:
        off = "" if self.is_on() else ", off under a GradScaler"
        return f"<GraphScale: {self.get_scale():g}{off}>"

    def is_on(self) -> bool:
        return not self.driven_by_grad_scaler

    def is_guarded(self) -> bool:
        """Whether an optimizer will skip a step if the gradients of a pass that runs now overflow:
        not in evaluation (Hessians), nor if it has judged them already, and takes more gradients in
        its step (AdaHessian)."""
        return self._may_overflow() and not (self._rounds.is_pending or self._is_in_evaluation)

    def _may_overflow(self) -> bool:
        """Whether gradients of parameters may overflow, as a step would be skipped; not where
        autograd raises for each that is not finite (`torch.autograd.detect_anomaly`)."""
        return self.has_optimizer and not torch.is_anomaly_enabled()

    def factor(self, gradient: Tensor, create_graph: bool, double_backward: bool = False) -> Tensor:
        """Return S for a gradient that comes in, on its device. It is written to when a round
        ends."""
        is_guarded = self.is_guarded() if double_backward else self._may_overflow()
        if create_graph or not is_guarded or self._alone.rules():
            return self._alone.factor(self, gradient, create_graph, double_backward)
        return self.factors_on(gradient.device)[0]

    def inverse(self, device: torch.device) -> Tensor:
        """Return 1/S on a device."""
        if self._alone.rules():
            return self._alone.inverse(self, device)
        return (self._factors.get(device) or self.factors_on(device))[1]

    def inputs_on(self, devices: Sequence[torch.device]) -> ScaleInputs:
        """Return S for a graph that reads it itself."""
        if not self._may_overflow():
            return self._alone.inputs_on(self, devices)
        return ScaleInputs(self, [self.factors_on(device)[0].data for device in devices])

    def factors_on(self, device: torch.device) -> Factors:
        """Return S and 1/S as they are in this round."""
        note_backward(self, device)
        if self._rounds.first_pass is None and (running := backward_pass()) != OUTSIDE:
            self._rounds.first_pass = running
        found = self._factors.get(device)
        if found is None:
            scale = sent(self._rounds.before.scale, device)
            found = self._factors[device] = scale, scale.reciprocal()
        return found

    def for_call(self, inputs: Sequence[Tensor]) -> GraphScale | ExposedScale:
        """Return the scale for one call of a graph.

        If a gradient of `inputs`, which are no parameters, is wanted, no skipped step would discard
        an overflow in it: this graph, and all graphs that the same call of the model runs later,
        get the cautious scale. A graph that a checkpoint runs again, inside a backward pass, is not
        asked about.
        """
        if inputs and not self._is_exposed and backward_pass() == OUTSIDE:
            self._is_exposed = are_wanted(inputs)
        is_exposed = self._is_exposed or self._exposed.rules()
        return ExposedScale(self, self._exposed) if is_exposed else self

    def note_parameters(self, parameters: Iterable[Tensor]) -> None:
        self.parameters.note(parameters)

    def spill_on(self, device: torch.device) -> Tensor:
        """Return the flag for gradients that go out to what the model does not own; see
        `Spills`."""
        return self.spills.flag_on(device)

    def may_have_spilled(self, by: object, left_over: LeftOver | None = None) -> bool:
        """Whether the gradients that `by` steps by may hold an overflow that it was not told of, or
        that it holds still; `left_over` as for `Spills`."""
        return self.is_on() and self.spills.are_new_to(by, left_over)

    def begin_step(self, by: object) -> None:
        """End the round if this optimizer has stepped in it before: the forward in between was not
        seen (reentrant checkpointing hides it)."""
        if self._rounds.has_stepped(by):
            self.end_round()

    def stepped(self, found_inf: Tensor, by: object, is_own: bool = True) -> None:
        """Take note that an optimizer stepped (0) or had to skip (1) in this round. `is_own`: it
        steps parameters of the model. That another one did not overflow counts only for a model
        whose parameters nobody steps."""
        self.has_optimizer = True
        self._is_stepped |= is_own
        counts = is_own or not (self._is_stepped and self.parameters.are_trained())
        self._rounds.step(found_inf, by, counts)
        self.checked.were_judged()

    def begin_forward(self, is_training: bool, is_inside: bool = False) -> None:
        """Begin a forward that autograd records; `is_inside`: of another one of the model, in which
        gradients of inputs may be wanted. In evaluation mode, after training in the other,
        gradients are looked at (Grad-CAM), and no step skips them."""
        note_forward(self)
        if not self._looked_around:
            self._looked_around = True
            self.driven_by_grad_scaler = is_grad_scaler_around()
        self._was_in_training |= is_training
        self._is_in_evaluation = self._was_in_training and not is_training
        self._is_exposed = self._is_in_evaluation or (is_inside and self._is_exposed)
        if is_captured(self._rounds.device):
            self._forget_factors()  # replayed, they are those of then
        self.end_round()

    def end_round(self) -> None:
        """Adjust the scale if there was a step; never during a backward pass, where the factor that
        came in must be the one that goes out. Raises OverflowAbort."""
        if self._rounds.is_pending and backward_pass() == OUTSIDE:
            self._rounds.end()
            self._begin_round()
            self._rounds.watch_skips()

    @property
    def skips(self) -> int:
        """Rounds in which an optimizer skipped its step; waits for the device."""
        return self.outcome().skips

    def get_scale(self) -> float:
        """The loss scale as a number; waits for the device."""
        return self.outcome().get_scale()

    def outcome(self) -> ScaleOutcome:
        """Return the outcome to be told of; computes nothing."""
        return self._rounds.outcome(self.is_on())

    def state_dict(self) -> dict[str, Any]:
        """A state that `load_state_dict` and `torch.amp.GradScaler.load_state_dict` take."""
        return save_state(self.config, self._rounds.state)

    def load_state_dict(self, state: Any) -> None:
        """Go on from a saved state, `GradScaler.state_dict()` too. Raises CheckpointError."""
        self.go_on_from(*load_state(self.config, state))

    def copy(self, parameters: Callable[[], Iterable[Tensor]]) -> GraphScale:
        """Return a scale of its own for a copy of the model."""
        scale = GraphScale(self.config, parameters)
        scale.go_on_from(self.config, self._rounds.state)
        return scale

    def go_on_from(self, config: LossScale, state: ScaleState) -> None:
        self._rounds.go_on_from(config, state)
        self._begin_round()

    def _begin_round(self) -> None:
        self.spills.clear()
        self.checked.forget_judged()
        self._forget_factors()

    def _forget_factors(self) -> None:
        self._factors.clear()
        self._alone.forget()
        self._exposed.forget()
