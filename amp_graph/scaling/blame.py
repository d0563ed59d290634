"""Whether gradients overflowed, and which loss scale is to blame.

What overflows inside of a model leaves it with the gradients of its own parameters, or spills out
with those of its inputs into what comes before it: a generator in front of a discriminator, an
encoder in front of a head. The optimizer that finds it there skips its step, and the scale that is
lowered is that of the model which spilled, not of the one it was spilled into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from amp_graph.gradients.engine import any_of, sent
from amp_graph.gradients.found_inf import found_inf, is_alone
from amp_graph.scaling.graph_scale import GraphScale
from amp_graph.scaling.spills import LeftOver


def overflowed(
    parameters: Sequence[Tensor],
    owners: Mapping[GraphScale, Sequence[Tensor]],
    by: object,
    left_over: LeftOver | None = None,
) -> Tensor:
    """Return 1 if a gradient of these parameters overflowed, as `found_inf` has it, else 0. Tell
    each scale its share of the blame for the step that `by` is about to take.

    owners: for each scale, those of the parameters that are of its model.
    left_over: as for `Spills`. Not None if no parameter has a scale; an overflow then counts only
        if one of the scales has spilled. Where ranks train together it counts in any case: it may
        have been spilled on another one, and come from there with the gradients that they share.
    """
    for scale in owners:
        scale.begin_step(by)
    shares = [_Share(scale, own, scale.spills.show(by, left_over)) for scale, own in owners.items()]
    if len(shares) == 1 and shares[0].spilled is None:
        scale, own = shares[0].scale, shares[0].own
        found = found_inf(parameters, checked=scale.checked)
        scale.stepped(found, by, is_own=bool(own))
        return found
    ids = {id(p) for own in owners.values() for p in own}
    of_all = found_inf(p for p in parameters if id(p) not in ids)
    for share in shares:
        if share.own:
            of_all = torch.maximum(share.found, sent(of_all, share.found.device))
    any_spilled = _any_spilled(shares)
    for share in shares:
        share.blame(of_all, any_spilled, by)
    if left_over is not None and any_spilled is not None and is_alone():
        return of_all * sent(any_spilled, of_all.device)
    return of_all


@dataclass
class _Share:
    """A scale's share in a step: its `own` parameters among those that are stepped, and whether its
    model `spilled` into others (None if it cannot have)."""

    scale: GraphScale
    own: Sequence[Tensor]
    spilled: Tensor | None

    @cached_property
    def found(self) -> Tensor:
        return found_inf(self.own, checked=self.scale.checked)

    def blame(self, of_all: Tensor, any_spilled: Tensor | None, by: object) -> None:
        """Tell the scale of its model's spills, if the overflow was in gradients that were looked
        at, and of overflows in its own parameters, if no model spilled into these."""
        spilled = self.spilled
        if spilled is not None:
            spilled = spilled * sent(of_all, spilled.device)
        if self.own:
            found = self.found
            if any_spilled is not None:
                found = found * (1 - sent(any_spilled, found.device))
            if spilled is not None:
                found = torch.maximum(found, sent(spilled, found.device))
            self.scale.stepped(found, by)
        elif spilled is not None:
            self.scale.stepped(spilled, by, is_own=False)


def _any_spilled(shares: Sequence[_Share]) -> Tensor | None:
    """Whether a model spilled since the parameters that are stepped got their first gradients; None
    if none can have."""
    passes = [share.scale.first_pass for share in shares if share.own]
    first = min((n for n in passes if n is not None), default=math.inf if passes else 0)
    spilled = ((s.spilled, s.scale.spills.last_pass) for s in shares)
    flags = [flag for flag, last in spilled if flag is not None and last >= first]
    return any_of(flags, flags[0].device) if flags else None
