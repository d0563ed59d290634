"""Why a node has its colour: from the node back to the list entry, number or person that decided.

add:      downstream of softmax, a denied operator
softmax:  on the deny list, group 'softmax' (deny.toml): Exponentials and their sum need ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from amp_graph.dtypes import dtype_name
from amp_graph.ir import Color, Paint, Plan
from amp_graph.listing import Listing
from amp_graph.rules import OPEN, WORDS, Rule

OWN_AUTOCAST = "the model's own autocast region"  # why something runs as captured


@dataclass(frozen=True)
class Reason:
    """One step of a chain of reasons: its sentence, and the node that it is about."""

    node: str
    text: str


def names_a_node(paint: Paint) -> bool:
    """Whether the decision follows from that for another node, `paint.because`."""
    return "{node}" in WORDS.get(paint.rule, "")


def short_reason(plan: Plan, name: str) -> str:
    """The rule that decided and what was responsible, in a few words and by the names to show."""
    paint = plan.paints.get(name)
    if paint is None:
        return ""
    named = plan.facts.get(paint.because) if names_a_node(paint) else None
    return (replace(paint, because=named.label) if named else paint).in_brief


def unlisted(plan: Plan) -> list[str]:
    """The operators of a graph that stay in float32 because no list knows them."""
    rules = {name: paint.rule for name, paint in plan.paints.items()}
    return sorted({f.op for n, f in plan.facts.items() if rules.get(n) == Rule.UNLISTED})


def why_nothing_is_low(plans: Sequence[Plan]) -> str:
    """Return what keeps most of the allowed operators of some graphs from running in low precision;
    "" if anything of these is converted."""
    if not plans:
        return "nothing of it was captured"
    if any(plan.converts for plan in plans):
        return ""
    fallbacks = [plan.fallback for plan in plans if plan.fallback]
    if fallbacks:
        return "; ".join(dict.fromkeys(fallbacks))
    reasons = Counter(
        short_reason(part, f.name)
        for plan in plans
        for part in plan.parts()
        for f in part.facts.values()
        if f.color is Color.ALLOW and f.reads
    )
    if not reasons:
        return "no operator of it is on the allow list and has float32 operands"
    ((reason, _),) = reasons.most_common(1)
    if reason.endswith(OWN_AUTOCAST):
        by = f"{OWN_AUTOCAST}, or that of a Trainer or of accelerate with bf16=True"
        return f"its operators on the allow list are under torch.autocast already ({by})"
    return f"its operators on the allow list are not ({reason})"


def why_inexact(plans: Mapping[int, Plan]) -> str:
    """Return why a model may differ from its float32 code though no node of a graph is low."""
    beside = [f"Graph {i} {plan.otherwise}" for i, plan in plans.items() if plan.autocast]
    return "; ".join(beside) or "Is the model random?"


class Chains:
    """The reasons for the precision of each node of a plan, its own first. `listings` has the list
    entries of the nodes, `spelled` the names to show."""

    def __init__(self, plan: Plan, listings: Mapping[str, Listing], spelled: Mapping[str, str]):
        self._plan, self._listings, self._spelled = plan, listings, spelled
        self._known: dict[str, tuple[Reason, ...]] = {}  # of many nodes the next is the same

    def of(self, name: str) -> tuple[Reason, ...]:
        whole = self._plan.otherwise
        first = () if whole is None else (Reason(name, f"the whole graph {whole}"),)
        return first + self._from(name)

    def _from(self, name: str) -> tuple[Reason, ...]:
        """From a node to what nothing else decided, or in a circle to where it closes."""
        path: dict[str, None] = {}
        while name in self._plan.paints and name not in self._known and name not in path:
            path[name] = None
            name = self._next(name)
        found = self._known.get(name, ())
        for node in reversed(path):
            found = (*self._own(node), *found)
            if name not in path:
                self._known[node] = found
        return found

    def _next(self, name: str) -> str:
        """The node that decided, if one did; else "", which is none."""
        paint = self._plan.paints[name]
        return paint.because if names_a_node(paint) and paint.because in self._plan.facts else ""

    def _own(self, name: str) -> Iterator[Reason]:
        paint = self._plan.paints[name]
        yield Reason(name, _text(self._plan, name, paint, self._listings, self._spelled))
        if paint.rule in OPEN and name in self._listings:
            listing = self._listings[name]
            yield Reason(name, _on_list(listing.color, listing))


def _text(
    plan: Plan,
    name: str,
    paint: Paint,
    listings: Mapping[str, Listing],
    spelled: Mapping[str, str],
) -> str:
    listing = listings.get(name)
    if paint.rule == Rule.LISTED:
        return _on_list(paint.color, listing) if listing is not None else paint.in_brief
    words = WORDS.get(paint.rule)
    if not words:
        return paint.in_brief
    return words.format(
        node=spelled.get(paint.because, paint.because),
        because=paint.because,
        dtype=dtype_name(plan.dtype),
        side=plan.precision(name),
    )


def _on_list(color: Color, listing: Listing) -> str:
    entry = f"group '{listing.group}' ({listing.file}): {listing.why}"
    return Rule.LISTED.words.format(color=color.value, entry=entry)


def dtype_of(plans: Sequence[Plan]) -> torch.dtype:
    """The low precision of a model's graphs; of its code, which may have another, if there are
    none. There is a plan."""
    return next((plan.dtype for plan in plans if plan.facts), plans[0].dtype)
