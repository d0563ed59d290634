"""Numbers on a device that the host gets to know without waiting for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_graph.gradients.engine import is_captured


class Readback:
    """The latest value of a device's counter that has arrived on the host, without waiting.

    A counter that grows by one per round, at most, cannot reach a limit before as many rounds as
    are missing; until then it is not read.

    rounds: since it was 0.
    """

    def __init__(self, rounds: float = 0) -> None:
        self.latest = 0
        self._rounds = rounds  # since it was read
        self._sent: tuple[Tensor, Any] | None = None

    def follow(self, counter: Tensor, limit: int | None) -> None:
        if is_captured(counter.device):
            return
        self._rounds += 1
        if self._sent is not None and self._sent[1].query():
            self.latest, self._sent = int(self._sent[0]), None
        if limit is None or self._sent is not None or self._rounds < limit - self.latest:
            return
        self._rounds = 0
        if counter.device.type == "cpu":
            self.latest = int(counter)
        else:
            arrived = torch.Event(counter.device)
            value = counter.to("cpu", non_blocking=True)
            arrived.record()
            self._sent = value, arrived
