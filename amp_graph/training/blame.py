"""Whether gradients overflowed, and which loss scale is to blame.

What overflows inside of a model leaves it with the gradients of its own parameters, or spills out
with those of its inputs into what comes before it: a generator in front of a discriminator, an
encoder in front of a head. The optimizer that finds it there skips its step, and the scale that is
lowered is that of the model which spilled, not of the one it was spilled into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from amp_graph.training.engine import any_of, sent
from amp_graph.training.found_inf import found_inf
from amp_graph.training.graph_scale import GraphScale


def overflowed(
    parameters: Sequence[Tensor],
    owners: Mapping[GraphScale, Sequence[Tensor]],
    by: object,
    only_spilled: bool = False,
) -> Tensor:
    """Whether any gradient of these parameters overflowed, as `found_inf` tells. Each scale is told
    of what it is to blame for, of the step that `by` is about to take. `owners`: those of the
    parameters that are of its model. `only_spilled`: none of them has a scale, so that an overflow
    counts only if one of the scales has spilled."""
    scales, owned = [*owners], [*owners.values()]
    for scale in scales:
        scale.begin_step(by)
    spills = [scale.spills.show(by) for scale in scales]
    if len(scales) == 1 and spills[0] is None:
        found = found_inf(parameters, checked=scales[0].checked)
        scales[0].stepped(found, by, is_own=bool(owned[0]))
        return found
    ids = {id(p) for own in owned for p in own}
    of_all = found_inf(p for p in parameters if id(p) not in ids)
    began = [s.first_pass for s, own in zip(scales, owned, strict=True) if own]
    first = min((n for n in began if n is not None), default=math.inf if ids else 0)
    flags = [
        spilled
        for scale, spilled in zip(scales, spills, strict=True)
        if spilled is not None and scale.spills.last_pass >= first  # not in an earlier round
    ]
    any_spilled = any_of(flags, flags[0].device) if flags else None
    found_own = [found_inf(own, checked=s.checked) for s, own in zip(scales, owned, strict=True)]
    for found, own in zip(found_own, owned, strict=True):
        of_all = torch.maximum(found, sent(of_all, found.device)) if own else of_all
    for scale, own, spilled, found in zip(scales, owned, spills, found_own, strict=True):
        if spilled is not None:  # into what is stepped now, or into gradients that were looked at
            spilled = spilled * sent(of_all, spilled.device)
        if own:
            if any_spilled is not None:
                found = found * (1 - sent(any_spilled, found.device))
            if spilled is not None:
                found = torch.maximum(found, sent(spilled, found.device))
            scale.stepped(found, by)
        elif spilled is not None:
            scale.stepped(spilled, by, is_own=False)
    if only_spilled and any_spilled is not None:
        return of_all * sent(any_spilled, of_all.device)
    return of_all
