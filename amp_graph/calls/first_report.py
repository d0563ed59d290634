"""The report on a model when its first call is over."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from amp_graph.cpu import emulates, why_emulated
from amp_graph.errors import did_you_mean, warn
from amp_graph.ir import NodeFacts, Plan
from amp_graph.modules import Entry, devices_of
from amp_graph.operator_names import close_operator, known_names
from amp_graph.override import Override
from amp_graph.policy import Policy
from amp_graph.reasons import why_nothing_is_low


def tell_of_first_call(entry: Entry, policy: Policy, plans: Sequence[Plan], has_run: bool) -> None:
    """Warn if nothing was converted, of which nobody has told yet, if products are emulated, or if
    an override names no node.

    plans: those of the call.
    has_run: whether any of their graphs has.
    """
    converted = {plan.dtype for plan in plans if plan.converts}
    is_told = not has_run and any(plan.fallback for plan in plans)
    if not converted and not is_told:
        warn(f"nothing of {entry.name} was converted: {why_nothing_is_low(plans)}")
    elif policy.emulation == "native" and "cpu" in devices_of(entry.module):
        if any(map(emulates, converted)):
            why = why_emulated(converted, policy.is_compiled)
            warn(f"{entry.name} may be slower than in float32: {why}", once_about=why)
    facts = [f for plan in plans for part in plan.parts() for f in part.facts.values()]
    for override in policy.overrides if facts and entry.is_call else ():
        if unmatched := _unmatched(override, facts):
            given, hint = unmatched
            warn(f"Override({given}) names no node of the first call of {entry.name}.{hint}")


def _unmatched(override: Override, facts: Sequence[NodeFacts]) -> tuple[str, str] | None:
    """Return the part of an override that names no node, with a close name. An operator counts only
    if none of its name is registered by now, since a policy may be for several models."""
    if override.name is not None:
        names = [f.name for f in facts]
        if not fnmatch.filter(names, override.name):
            return f"name={override.name!r}", did_you_mean(override.name, names)
    if override.op is not None and not any(override.names(f.op) for f in facts):
        known = known_names()
        if "." in override.op and override.op not in known:  # else a higher-order one
            return f"op={override.op!r}", close_operator(override.op, known)
    return None
