"""Paint: give every node a colour and the reason for it.

    x -> mm -> exp -> add -> mm2        mm, mm2  ALLOW  "listed"
                                        exp      DENY   "listed"
                                        add      DENY   "downstream of", because exp

The rules apply in the order of `RULES`: first those that look at one node alone, then those that
follow the flow of values. Each rule sees the colours given before it and returns new ones. A node
that no rule paints is free: it keeps the colour of its list, INFER or CLEAR, and `place_casts`
chooses its precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import networkx as nx
import torch

from amp_graph.flow import huge_values
from amp_graph.ir import FREE, READERS, Color, NodeFacts, Paint
from amp_graph.levels import Level
from amp_graph.oplists import OpLists
from amp_graph.passes.analysis import AnalyzedGraph, GraphRule, Paints
from amp_graph.passes.node_rules import NODE_RULES
from amp_graph.passes.promotion import promotion
from amp_graph.policy import Policy
from amp_graph.rules import Rule

MOST = 1_000_000  # gradients that are counted
MANY_COPIES = 512  # of a value, whose gradients' sum the loss scale would have to make room for
# The rules whose denied operators deny, at levels below "max", what is computed on their results.
SPREAD = (Rule.LISTED, Rule.OVERRIDE, Rule.USER_CAST, Rule.OUT_OF_RANGE, Rule.NOT_KNOWN)


def paint(
    facts: Mapping[str, NodeFacts],
    flow: nx.DiGraph,
    lists: OpLists,
    policy: Policy,
    dtype: torch.dtype,
    saved: Mapping[str, Paint] | None = None,
    refused: Collection[str] = (),
) -> dict[str, Paint]:
    """Return a Paint for every node, in graph order.

    flow: the graph's `flow_graph`.
    saved: decisions of a saved plan, which beat the lists.
    refused: nodes whose kernels were seen not to take `dtype`.
    """
    nodes = tuple(facts.values())
    operators = ((n, f) for n, f in enumerate(nodes) if f.op != "getitem")
    graph = AnalyzedGraph(
        nodes,
        flow,
        lists,
        dtype,
        level=Level(policy.level),
        overrides={n: o for n, f in operators if (o := policy.override_for(f))},
        saved={n: saved[f.name] for n, f in enumerate(nodes) if f.name in saved} if saved else {},
        refused={n for n, f in enumerate(nodes) if f.name in refused} if refused else (),
    )
    painted: Paints = {}
    for rule in RULES:
        painted.update(rule(graph, painted))
    wide, huge = promotion(graph, painted).wide, huge_values(nodes, flow, graph.colors, dtype)
    paints: dict[str, Paint] = {}
    for n, name in enumerate(facts):
        given = painted.get(n) or _free(graph, n)
        is_plain = n not in wide and n not in huge
        paints[name] = given if is_plain else replace(given, wide=n in wide, huge=n in huge)
    return paints


def _free(graph: AnalyzedGraph, n: int) -> Paint:
    color, f = graph.colors[n], graph.facts[n]
    assert color in FREE, f"no rule painted {f.name} ({f.op})"
    return Paint(color, Rule.MATH_INSIDE if f.storage else Rule.FREE, f.group)


def one_by_one(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Paints:
    """Paint each node by the first of `NODE_RULES` that has an answer."""
    paints: Paints = {}
    for n in range(len(graph.facts)):
        for rule in NODE_RULES:
            given = rule(graph, n)
            if given is not None:
                paints[n] = given
                break
    return paints


def deny_spreads(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Paints:
    """Spread deny downstream through infer nodes, and through clear nodes that lead to an infer
    node.

    An allowed operator, an unlisted one, or one with a bounded result stops it. A mask does not
    spread it. At level "max" it does not spread at all.
    """
    if graph.level is Level.MAX:
        return {}
    unsafe: dict[int, str] = {}  # node -> the denied ancestor
    clear_between: list[int] = []
    paints: Paints = {}
    for n, f in enumerate(graph.facts):  # graph order is topological
        if n in painted:
            if _spreads(f, painted[n]):
                unsafe[n] = f.name
            continue
        masks = graph.masked.get(n, ())
        operands = (p for p in graph.flow.predecessors(n) if p not in masks)
        ancestor = next((unsafe[p] for p in operands if p in unsafe), None)
        if ancestor is None:
            continue
        if not f.bounded:
            unsafe[n] = ancestor
        if graph.colors[n] is Color.INFER:
            paints[n] = Paint(Color.DENY, Rule.DOWNSTREAM, ancestor)
        else:
            clear_between.append(n)
    for n in reversed(clear_between):
        if any(reader in paints for reader in graph.flow.successors(n)):
            paints[n] = Paint(Color.DENY, Rule.DOWNSTREAM, unsafe[n])
    return paints


def _spreads(f: NodeFacts, painted: Paint) -> bool:
    return painted.color is Color.DENY and painted.rule in SPREAD and not f.bounded


def wide_operands(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Paints:
    """Deny an infer operator unless a low value reaches it and no wide value does.

    PyTorch promotes a mix of float32 and low precision to float32, as in a residual stream that
    begins with an embedding, and so does this rule. The exception is a stream that is narrowed: a
    sum is no more exact than its low operand.
    """
    paints: Paints = {}
    for n, operand in promotion(graph, painted).not_low.items():
        if n in painted:
            continue
        if operand is None:
            paints[n] = Paint(Color.DENY, Rule.NOTHING_LOW)
        else:
            paints[n] = Paint(Color.DENY, Rule.PROMOTED, graph.facts[operand].name)
    return paints


def read_by_many(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Paints:
    """Deny a node that only moves float32 values if more gradients are added up in it than a cast
    has readers. The casts then stand behind it, and autograd adds the gradients up in float32."""
    gradients = _gradients(graph, painted)
    many = [n for n, count in enumerate(gradients) if count > READERS]
    wide = promotion(graph, painted).wide if many else ()
    return {n: Paint(Color.DENY, Rule.READ_BY_MANY, f"{gradients[n]:,}") for n in many if n in wide}


def _gradients(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> list[int]:
    """Count, for each node that only moves one value, the gradients that are added up per element.

    Nodes that move the value on count as well, as with overlapping windows, or shifts by one step
    at each step. In float16, where a sum may overflow, sums that a kernel makes in float32 count,
    too.
    """
    found = [0] * len(graph.facts)
    for n in reversed(range(len(found))):
        f = graph.facts[n]
        is_open = graph.colors[n] is Color.CLEAR and n not in painted
        if f.recorded and is_open and _is_one_value(f):
            read = sum(found[r] or 1 for r in graph.flow[n] if _gives_gradient(graph.facts[r]))
            found[n] = min(read * max(f.sums, _copies(graph, f)), MOST)
    return found


def _gives_gradient(reader: NodeFacts) -> bool:
    return reader.recorded or reader.op == "output"


def _copies(graph: AnalyzedGraph, f: NodeFacts) -> int:
    """Return how many copies of a repeated or expanded value the result holds; 1 if they are
    few."""
    if graph.dtype is not torch.float16:
        return 1
    largest = max((o.numel for o in graph.operands(f)), default=0)
    copies = f.numel // max(1, largest)
    return copies if copies > MANY_COPIES else 1


def _is_one_value(f: NodeFacts) -> bool:
    return f.op != "getitem" and len(f.tensors) == 1


def follow_parent(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Paints:
    """Paint each single result of an operator with several like that operator."""
    paints: Paints = {}
    for n, f in enumerate(graph.facts):
        if f.op == "getitem" and n not in painted:
            for parent in graph.flow.predecessors(n):
                given = painted.get(parent) or paints.get(parent)
                if given is not None:
                    paints[n] = Paint(given.color, Rule.RESULT, graph.facts[parent].name)
    return paints


def shared_memory(graph: AnalyzedGraph, painted: Mapping[int, Paint]) -> Paints:
    """Give all nodes that live in one piece of written memory, or write into it, one precision.

    It is float32 if any of them must be float32, else low if any must be low. The operator that
    made the memory keeps its colour.
    """
    paints: Paints = {}
    for owner, members in _members(graph).items():
        colors = {n: painted[n].color for n in members if n in painted}
        float32 = [n for n, c in colors.items() if c in (Color.DENY, Color.KEEP)]
        low = [n for n, c in colors.items() if c is Color.ALLOW]
        decided = Color.DENY if float32 else Color.ALLOW
        for n in members if float32 or low else ():
            is_settled = colors.get(n) in (decided, Color.KEEP)
            if not is_settled and (n != owner or owner not in painted):
                deciding = graph.facts[(float32 or low)[0]]
                paints[n] = Paint(decided, Rule.SHARED_MEMORY, deciding.name)
    return paints


def _members(graph: AnalyzedGraph) -> dict[int, list[int]]:
    """Return the nodes that live in each written memory of the graph's own, or write into it, by
    the memory's owner."""
    owners = {f.name: n for n, f in enumerate(graph.facts) if f.written and not f.external}
    members: dict[int, list[int]] = {}
    for n, f in enumerate(graph.facts):
        for memory in dict.fromkeys((f.memory, *f.writes)) if f.written or f.writes else ():
            if memory in owners:
                members.setdefault(owners[memory], []).append(n)
    return members


RULES: tuple[GraphRule, ...] = (
    one_by_one,
    deny_spreads,
    wide_operands,
    read_by_many,
    follow_parent,
    shared_memory,
)
