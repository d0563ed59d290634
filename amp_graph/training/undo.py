"""What it takes to undo an optimizer's step."""

from __future__ import annotations

import copy

import torch
from torch.optim import Optimizer

from amp_graph.training.found_inf import parameters_of


class Copies:
    """An optimizer's parameters, gradients and state as they are now."""

    def __init__(self, optimizer: Optimizer):
        self._values = [(p, p.detach().clone(), p.grad) for p in parameters_of(optimizer)]
        self._state = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}

    def give_zeros(self) -> None:
        """Replace the gradients, until they are put back."""
        for parameter, _, gradient in self._values:
            parameter.grad = None if gradient is None else torch.zeros_like(gradient)

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        for parameter, value, gradient in self._values:
            parameter.copy_(value)
            parameter.grad = gradient
        optimizer.state.clear()
        optimizer.state.update(self._state)
