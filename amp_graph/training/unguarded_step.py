"""A step that did not come through its optimizer's guard."""

from __future__ import annotations

from dataclasses import dataclass

from amp_graph.training.inner_passes import InnerPasses
from amp_graph.training.undo import Undo


@dataclass
class UnguardedStep:
    """The state of an unguarded step while it is under way.

    depth: how many steps it is in the middle of; one may call that of its base class.
    undo: undoes it, if it began with an overflow, or its closure may meet one.
    passes: the passes that it makes itself, if it got no closure and began with no overflow.
    found: False if the gradients that it then began with were made under a scale; else None.
    """

    depth: int = 1
    undo: Undo | None = None
    passes: InnerPasses | None = None
    found: bool | None = None

    def give_up(self) -> None:
        """Clean up: the step raised, or another one began meanwhile."""
        if self.undo is not None:
            self.undo.give_back()
        if self.passes is not None:
            self.passes.leave()
