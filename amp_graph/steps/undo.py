"""Undo an optimizer's step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_graph.errors import in_words, warn
from amp_graph.gradients.found_inf import parameters_of


class Undo:
    """An optimizer's parameters, gradients, state and options as they are now."""

    def __init__(self, optimizer: Optimizer):
        self._values = [(p, p.detach().clone(), p.grad) for p in parameters_of(optimizer)]
        self._zeros: list[Tensor | None] = []
        self._state = _state_of(optimizer)
        # Some count their steps in the groups; what else these hold, a module, say, is not copied.
        self._groups = [(group, {**group}) for group in optimizer.param_groups]
        held = [v for group, _ in self._groups for v in group.values() if isinstance(v, Tensor)]
        self._options = [(option, option.detach().clone()) for option in held]

    def give_zeros(self) -> None:
        """Replace the gradients, until they are put back."""
        self._zeros = [None if g is None else _zeros_of(g) for _, _, g in self._values]
        for (parameter, _, _), zeros in zip(self._values, self._zeros, strict=True):
            parameter.grad = zeros

    def give_back(self) -> None:
        """Put back the gradients where nobody else has since replaced the zeros: the step raised,
        and what it left behind is its own affair."""
        for (parameter, _, gradient), zeros in zip(self._values, self._zeros, strict=False):
            if parameter.grad is zeros:
                parameter.grad = gradient

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        for parameter, value, gradient in self._values:
            parameter.copy_(value)
            parameter.grad = gradient
        if self._state is not None:
            optimizer.state.clear()
            optimizer.state.update(self._state)
        for option, value in self._options:
            option.copy_(value)
        for group, before in self._groups:
            group.clear()
            group.update(before)


def _state_of(optimizer: Optimizer) -> dict[Tensor, Any] | None:
    """Return a copy of an optimizer's state; None, with a warning, if there can be none, as for
    tensors of a class that does not take `clone` (8-bit numbers, say)."""
    if not hasattr(optimizer, "state"):  # a wrapper
        return None
    try:
        return {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
    except Exception as error:
        warn(
            f"the state of {type(optimizer).__name__} cannot be copied ({in_words(error)}). If "
            f"gradients overflow in the middle of one of its steps its parameters are put back, "
            f"and its state is not"
        )
        return None


def _zeros_of(gradient: Tensor) -> Tensor:
    """Return zeros that can be differentiated if the gradient can, as AdaHessian does inside of a
    step."""
    zeros = torch.zeros_like(gradient)
    if not gradient.requires_grad:
        return zeros
    with torch.enable_grad():
        return torch.where(torch.zeros_like(gradient, dtype=torch.bool), gradient, zeros)
