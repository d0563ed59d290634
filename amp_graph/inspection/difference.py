"""`diff`: what differs between the plans of two models, or of one model at two times, and why.

graph 0: 2 nodes decided otherwise, casts 286.3 KiB -> 240.0 KiB
  gelu      infer, bfloat16 (free: activations)  ->  deny, float32 (override: op=aten.gelu)
  linear_1  ...

Where a colour was edited in a file, what it leads to is not there before a model follows the plan.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from amp_graph.dtypes import dtype_name
from amp_graph.inspection.spelling import byte_count, count, line_of
from amp_graph.inspection.terminal import Shown, columns
from amp_graph.ir import FREE, Cast, Color, Plan
from amp_graph.plans.pins import Saved
from amp_graph.plans.plan_file import PlanSource, as_plans
from amp_graph.reasons import short_reason
from amp_graph.rules import OPEN, Rule


@dataclass(frozen=True)
class NodeDecision:
    """The decision for a node: its colour, the precision it runs in, and the reason."""

    color: str
    precision: str
    why: str

    def __str__(self) -> str:
        return f"{self.color}, {self.precision} ({self.why})"


@dataclass(frozen=True)
class Change:
    """A node that was decided otherwise. None: the graph does not have the node."""

    node: str
    source: str
    before: NodeDecision | None
    after: NodeDecision | None


@dataclass(frozen=True)
class GraphDifference:
    """The differences between two plans.

    name: counts the graphs; bodies go by their own name.
    edited: whether a colour of each plan was edited, so that other nodes and casts are still to
        follow.
    """

    name: str
    changes: tuple[Change, ...]
    casts_before: tuple[Cast, ...]
    casts_after: tuple[Cast, ...]
    fallbacks: tuple[str | None, str | None]
    edited: tuple[bool, bool] = (False, False)

    @property
    def is_empty(self) -> bool:
        same_casts = set(self.casts_before) == set(self.casts_after)
        return not self.changes and same_casts and self.fallbacks[0] == self.fallbacks[1]


@dataclass(frozen=True, repr=False)
class Difference(Shown):
    """The result of `diff`; false if nothing differs.

    only_before, only_after: how many graphs have no counterpart.
    """

    graphs: tuple[GraphDifference, ...]
    only_before: int = 0
    only_after: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_before or self.only_after) or any(not g.is_empty for g in self.graphs)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self:
            yield Text("The plans decide alike.")
        for graph in self.graphs:
            if not graph.is_empty:
                yield Text(_title(graph), style="bold")
                yield Padding(_table(graph.changes), (0, 0, 0, 2))
        for number, where in ((self.only_before, "first"), (self.only_after, "second")):
            if number:
                yield Text(f"{count(number, 'graph')} in the {where} alone")


def diff(before: PlanSource, after: PlanSource) -> Difference:
    """Compare two plans, or all plans of two models: each a file, a Plan or several Plans.

    Plans of the same graph are compared with each other, the others in order of capture; nodes by
    name. Raises PlanError for a file that cannot be read.
    """
    first, second = as_plans(before), as_plans(after)
    pairs = _pairs(first, second)
    graphs = [g for i, (a, b) in enumerate(pairs) for g in _differences(f"graph {i}", a, b)]
    only_before, only_after = (len(s.plans) - len(pairs) for s in (first, second))
    return Difference(tuple(graphs), only_before, only_after)


def _pairs(first: Saved, second: Saved) -> list[tuple[Plan, Plan]]:
    alike: defaultdict[str, deque[Plan]] = defaultdict(deque)
    for mark, plan in zip(second.fingerprints, second.plans, strict=True):
        alike[mark].append(plan)
    partners = [alike[mark].popleft() if alike[mark] else None for mark in first.fingerprints]
    left = {id(plan) for plans in alike.values() for plan in plans}
    others = (plan for plan in second.plans if id(plan) in left)
    pairs = (
        (plan, partner or next(others, None))
        for plan, partner in zip(first.plans, partners, strict=True)
    )
    return [(plan, partner) for plan, partner in pairs if partner is not None]


def _differences(name: str, a: Plan, b: Plan) -> Iterator[GraphDifference]:
    nodes = dict.fromkeys([*a.facts, *b.facts])
    changes = tuple(c for n in nodes if (c := _change(n, a, b)) is not None)
    fallbacks, edited = (a.otherwise, b.otherwise), (_has_edits(a), _has_edits(b))
    yield GraphDifference(name, changes, a.casts, b.casts, fallbacks, edited)
    for body in (name for name in a.bodies if name in b.bodies):
        yield from _differences(f"{name}, {body}", _body(a, body), _body(b, body))


def _body(plan: Plan, name: str) -> Plan:
    """The plan of a graph inside, which runs as captured if that does which it is in."""
    body = plan.bodies[name]
    return replace(body, fallback=body.fallback or plan.fallback)


def _has_edits(plan: Plan) -> bool:
    return any(_is_edited(plan, name) for name in plan.paints)


def _is_edited(plan: Plan, name: str) -> bool:
    """Whether its colour is not one that the rest of the plan was made with."""
    if plan.fallback is not None:
        return False
    paint, is_low = plan.paints[name], name in plan.low
    was_free = paint.rule in OPEN
    if paint.color in FREE:
        return not was_free and paint.rule not in (Rule.EDITED, Rule.RESULT)
    expected = {Color.ALLOW: True, Color.DENY: False}
    return paint.color in expected and (was_free or is_low is not expected[paint.color])


def _change(name: str, a: Plan, b: Plan) -> Change | None:
    before, after = _decision(a, name), _decision(b, name)
    if before == after:
        return None
    facts = b.facts.get(name) or a.facts[name]
    return Change(facts.label, facts.source, before, after)


def _decision(plan: Plan, name: str) -> NodeDecision | None:
    if name not in plan.facts:
        return None
    if name not in plan.paints:
        return NodeDecision("undecided", plan.precision(name), "")
    color, low = plan.paints[name].color, dtype_name(plan.dtype)
    if not _is_edited(plan, name):
        return NodeDecision(color.value, plan.precision(name), short_reason(plan, name))
    implied = {Color.ALLOW: low, Color.DENY: "float32"}.get(color, f"{low} or float32")
    return NodeDecision(color.value, implied, "edited by hand")


def _title(graph: GraphDifference) -> str:
    sides = zip((graph.casts_before, graph.casts_after), graph.edited, strict=True)
    casts = [_casts(*side) for side in sides]
    title = f"{graph.name}: {count(len(graph.changes), 'node')} decided otherwise, casts "
    title += " -> ".join(casts)
    if graph.fallbacks[0] != graph.fallbacks[1]:
        spelled = [f or "runs as decided" for f in graph.fallbacks]
        title += f"; {spelled[0]} -> {spelled[1]}"
    return title


def _casts(casts: tuple[Cast, ...], is_edited: bool) -> str:
    if is_edited:
        return "to follow when a model runs with the edits"
    return f"{len(casts)} moving {byte_count(sum(c.bytes for c in casts))}"


def _table(changes: tuple[Change, ...]) -> Table:
    found = columns("node", "before", "after", "line", whole=(3,))
    for change in changes:
        sides = [str(side) if side else "not there" for side in (change.before, change.after)]
        found.add_row(
            Text(change.node), Text(sides[0]), Text(sides[1]), Text(line_of(change.source))
        )
    return found
