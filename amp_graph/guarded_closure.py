"""An optimizer's closure, with its gradients checked after every evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class GuardedClosure:
    """Evaluates a closure once before the optimizer runs, hands that result out at the first call,
    and after an overflow in a later one evaluates nothing more.

    With `keep_copies`, parameters and optimizer state can be put back afterwards.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        overflows: Callable[[], bool],
        optimizer: Optimizer,
        keep_copies: bool,
    ):
        self._closure = closure
        self._overflows = overflows
        self.calls = 0
        self._loss = self._evaluate()
        self.overflowed = overflows()
        self._saved = _saved(optimizer) if keep_copies else None

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls > 1 and not self.overflowed:
            self._loss = self._evaluate()
            self.overflowed = self._overflows()
        return self._loss

    def _evaluate(self) -> Any:
        with torch.enable_grad():
            return self._closure()

    @property
    def can_put_back(self) -> bool:
        return self._saved is not None

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Parameters and state as they were before the optimizer ran."""
        assert self._saved is not None
        parameters, state = self._saved
        for parameter, value in parameters:
            parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)


def _saved(optimizer: Optimizer) -> tuple[list[tuple[Tensor, Tensor]], dict[Any, Any]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [(p, p.detach().clone()) for p in parameters]
    return values, {p: copy.deepcopy(s) for p, s in optimizer.state.items()}
