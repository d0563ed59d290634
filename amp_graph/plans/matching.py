"""Match a captured graph with a saved plan.

A plan is for the same graph if operators, operands by name, dtypes, shapes and module paths are the
same: the fingerprint. It is for the same computation, at other shapes or in the other of train and
eval mode, if there are the same operators on float32 tensors, in the same order, on each other's
results, in the same modules, apart from views.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amp_graph.ir import NodeFacts, Plan

# Operators that are a view at some sizes, and a copy, or left out, at others.
MAY_COPY = {"clone", "contiguous", "flatten", "ravel", "reshape", "reshape_as"}


def fingerprint(plan: Plan) -> str:
    """Return a digest of the graph that a plan is for, whatever was decided for it."""
    text = json.dumps(_description(plan), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def computing(plan: Plan) -> dict[str, NodeFacts]:
    """Return the nodes with something to decide, apart from those that hand numbers on. Where sizes
    are symbolic a graph has more of these: a slice of everything, say, which is no node otherwise.
    """
    return {
        name: f for name, f in plan.facts.items() if not f.fixed and f.tensors and not _hands_on(f)
    }


def _hands_on(facts: NodeFacts) -> bool:
    may_copy = len(facts.reads) == 1 and not MAY_COPY.isdisjoint(facts.op.split("."))
    return (facts.is_view or may_copy) and not facts.writes


def is_same_computation(plan: Plan, captured: Plan) -> bool:
    if plan.bodies.keys() != captured.bodies.keys() or not plan.facts:
        return False
    if _computation(plan) != _computation(captured):
        return False
    return all(is_same_computation(b, captured.bodies[n]) for n, b in plan.bodies.items())


def _computation(plan: Plan) -> list[Any]:
    nodes = computing(plan)
    index = {name: i for i, name in enumerate(nodes)}
    return [
        (f.op, f.module_path, [index[r] for r in _made_by(plan, f.reads) if r in index])
        for f in nodes.values()
    ]


def _made_by(plan: Plan, names: Iterable[str]) -> Iterator[str]:
    """Yield the nodes that made these values, seen through nodes that hand them on."""
    for name in names:
        facts = plan.facts[name]
        while _hands_on(facts) and len(facts.reads) == 1:
            facts = plan.facts[facts.reads[0]]
        yield facts.name


def _description(plan: Plan) -> list[Any]:
    rename = _symbols(plan)
    nodes = [_node(f, rename) for f in plan.facts.values()]
    return [nodes, {name: _description(body) for name, body in sorted(plan.bodies.items())}]


def _node(f: NodeFacts, rename: Mapping[str, str]) -> dict[str, Any]:
    def size(s: int | str) -> int | str:
        return s if isinstance(s, int) else re.sub(r"\b[su]\d+\b", lambda m: rename[m[0]], s)

    return {
        "name": f.name,
        "operator": f.op,
        "operands": list(f.operands),
        "results": [[str(t.dtype), [size(s) for s in t.shape]] for t in f.tensors],
        "module": f.module_path,
    }


def _symbols(plan: Plan) -> dict[str, str]:
    """Number symbolic sizes in the order in which they appear: torch numbers them as it likes."""
    sizes = (str(s) for f in plan.facts.values() for t in f.tensors for s in t.shape)
    symbols = dict.fromkeys(s for size in sizes for s in re.findall(r"\b[su]\d+\b", size))
    return {symbol: f"size{i}" for i, symbol in enumerate(symbols)}


def common_nodes(plan: Plan, captured: Plan) -> int:
    """Return how many nodes there are up to the first that differs."""
    pairs = zip(_computation(plan), _computation(captured), strict=False)
    return next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), len(plan.facts))


def first_difference(plan: Plan, captured: Plan) -> str:
    pairs = zip(computing(plan).values(), computing(captured).values(), strict=False)
    same = zip(_computation(plan), _computation(captured), strict=False)
    for (theirs, ours), (then, now) in zip(pairs, same, strict=True):
        if then != now:
            where = f" at {ours.source}" if ours.source else ""
            was = _spelled(plan, theirs, ours.op, ours.module_path)
            now_is = _spelled(captured, ours, theirs.op, theirs.module_path)
            return f"First difference: node '{ours.name}'{where} is {now_is}; it was {was}."
    return _surplus(list(computing(plan)), list(computing(captured)))


def _spelled(plan: Plan, node: NodeFacts, op: str, path: str) -> str:
    """Describe a node by the first of its operator, module and operands that differs from the given
    ones."""
    if node.op != op:
        return node.op
    if node.module_path != path:
        return f"in module '{node.module_path}'"
    return f"on {', '.join(_made_by(plan, node.reads))}"


def _surplus(theirs: Sequence[str], ours: Sequence[str]) -> str:
    if len(ours) > len(theirs):
        return f"First difference: node '{ours[len(theirs)]}' is new."
    if len(theirs) > len(ours):
        return f"First difference: node '{theirs[len(ours)]}' is gone."
    return "The graphs inside its higher-order operators differ."
