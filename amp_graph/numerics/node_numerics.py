"""The findings of `compare` about one operator."""

from __future__ import annotations

from dataclasses import dataclass

from amp_graph.numerics.statistics import Statistics


@dataclass(frozen=True)
class NodeNumerics:
    """An operator of a graph, and its errors.

    added: how much larger the error of its value is than that of any operand: where an error
        begins.
    call: counts the graphs that ran.
    """

    node: str
    label: str
    operator: str
    module: str
    source: str
    code: str
    graph: int
    body: str
    call: int
    low: bool
    dtype: str
    forward: Statistics
    backward: Statistics | None
    added: float

    @property
    def underflow(self) -> float:
        """The largest share of values or gradients that became zero."""
        return max(self.forward.underflow, self.backward.underflow if self.backward else 0.0)

    @property
    def faults(self) -> float:
        """The largest share of values or gradients that overflow or underflow."""
        sides = [s for s in (self.forward, self.backward) if s is not None]
        return max(max(s.underflow, s.overflow) for s in sides)

    @property
    def badness(self) -> tuple[bool, float, float]:
        """The key that sorts the worst first: overflow, then the error that begins here, then
        underflow."""
        backward = self.backward
        overflow = self.forward.overflow + (backward.overflow if backward else 0.0)
        return overflow > 0, self.added, self.faults
