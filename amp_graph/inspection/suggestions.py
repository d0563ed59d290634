"""What a user could change to run more in low precision, the most rewarding first.

Every operator that stays in float32 is counted under the decision that is at the end of its chain
of reasons: an operator on no list, a denied ancestor, a float32 value that it reads, a cast in the
model's own code, an override. What one change would free is the bytes that those operators would
read and write less, and the floating-point operations that would become cheaper.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.spelling import byte_count, count, flop_count, graph_title, line_of

FLOPS_PER_BYTE = 50  # how many cost as much time as a byte; the order is insensitive to it
SHOWN = 3
SCALAR = "()"  # the shape of a number, which promotes nothing

Found: TypeAlias = list[tuple[AnnotatedNode, AnnotatedNode]]
Tell: TypeAlias = Callable[[Found], tuple[str, str]]


@dataclass(frozen=True)
class Suggestion:
    """One change: what it is about, how to make it, and what it would free."""

    what: str
    how: str
    nodes: int
    bytes: int
    flops: int

    @property
    def gain(self) -> str:
        parts = [count(self.nodes, "operator")]
        parts += [f"{byte_count(self.bytes)} less for them to move"] if self.bytes else []
        parts += [f"{flop_count(self.flops)} in low precision"] if self.flops else []
        return ", ".join(parts)


def suggestions(graphs: Sequence[AnnotatedGraph], breaks: Sequence[str]) -> tuple[Suggestion, ...]:
    """At most three, best first."""
    found: list[Suggestion] = []
    for graph in graphs:
        if graph.fallback:
            found.append(_fallback(graph))
    groups: dict[tuple[Tell, str], Found] = defaultdict(list)
    for graph in graphs:
        nodes = {n.name: n for n in graph.nodes}
        reached: set[str] = set()  # by something low, if what is denied did not spread
        for node in graph.nodes:
            if node.is_float and not node.low and not graph.fallback and node.chain:
                root = nodes.get(node.chain[-1].node, node)
                key = _key(node, root)
                if key is None or (key[0] is _spread and not _is_freed(node, root, nodes, reached)):
                    continue
                reached.add(node.name)
                groups[key].append((node, root))
    told = [_told(tell, found_here) for (tell, _), found_here in groups.items()]
    told = [s for s in told if s.bytes or s.flops]
    found += sorted(told, key=lambda s: -(s.bytes + s.flops / FLOPS_PER_BYTE))
    found += [_break(reason) for reason in breaks]
    return tuple(found[:SHOWN])


def _is_freed(
    node: AnnotatedNode,
    root: AnnotatedNode,
    nodes: Mapping[str, AnnotatedNode],
    reached: Container[str],
) -> bool:
    """Whether it would be, if what is denied did not spread, casts looked through: it reads
    something that is low or would be, and nothing else but the root that stays in float32."""
    operands = (nodes[name] for name in node.operands if name in nodes)
    values = [nodes.get(o.value, o) if o.kind == "cast" else o for o in operands]
    low = [value for value in values if value.low or value.name in reached]
    wide = [v for v in values if v.storage == "float32" and v.shape != SCALAR and v not in low]
    return bool(low) and all(value is root for value in wide)


def _key(node: AnnotatedNode, root: AnnotatedNode) -> tuple[Tell, str] | None:
    """Which change would free the node, and which decision it shares with others."""
    if root.rule == "on no list":
        return _unlisted, root.op
    if node.rule == "promoted by":
        return _promoted, root.name
    if root.rule == "listed" and node is not root:
        return _spread, root.op
    if root.rule == "user cast":
        return _user_cast, root.source
    return (TELL[root.rule], root.why) if root.rule in TELL else None


def _told(tell: Tell, found: Found) -> Suggestion:
    what, how = tell(found)
    nodes = [node for node, _ in found]
    return Suggestion(
        what, how, len(nodes), sum(n.traffic for n in nodes), sum(n.flops for n in nodes)
    )


def _at(node: AnnotatedNode) -> str:
    line = line_of(node.source)
    return f" at {line}" if line else ""


def _unlisted(found: Found) -> tuple[str, str]:
    op = found[0][1].op
    return (
        f"{op} is on no list, so it stays in float32",
        f'if it is safe on well-behaved values: Policy(lists={{"infer": ["{op}"]}})',
    )


def _spread(found: Found) -> tuple[str, str]:
    root = found[0][1]
    entry = f'{{"why": "...", "bounded": True, "ops": ["{root.op}"]}}'
    return (
        f"{root.label} ({root.op}{_at(root)}) is denied, and what computes on its values with it",
        f'if its values stay in a small range: Policy(lists={{"deny": {{"mine": {entry}}}}})',
    )


def _promoted(found: Found) -> tuple[str, str]:
    root = found[0][1]
    names = [*dict.fromkeys(node.name for node, _ in found)]  # alike in several graphs
    if len(names) == 1:
        overrides = f'(Override("allow", name="{names[0]}"),)'
    else:
        overrides = f'[Override("allow", name=n) for n in {json.dumps(names)}]'
    return (
        f"{root.label}{_at(root)} holds full float32, and operators that also read it follow",
        f"if its last digits do not matter: Policy(overrides={overrides})",
    )


def _user_cast(found: Found) -> tuple[str, str]:
    root = found[0][1]
    return (
        f"the model converts to float32 by itself{_at(root)}: {root.code or root.op}",
        "remove that conversion, if it is there for float16 only",
    )


def _override(found: Found) -> tuple[str, str]:
    root = found[0][1]
    what = f"an override keeps operators in float32: {root.because}"
    return what, "narrow or remove the override"


def _constant(found: Found) -> tuple[str, str]:
    root = found[0][1]
    vanishes = abs(float(root.because)) < 1
    return (
        f"the constant {root.because} of {root.label}{_at(root)} is out of the low precision's "
        f"range",
        "use a larger one, which does not vanish: in float16 an epsilon of 1e-4, say"
        if vanishes
        else "use a constant within it, such as -1e4 or -inf for a mask",
    )


def _no_kernel(found: Found) -> tuple[str, str]:
    return found[0][1].why, "use the other low precision, if it has a kernel there"


TELL: dict[str, Tell] = {
    "override": _override,
    "constant out of range": _constant,
    "no kernel": _no_kernel,
}


def _fallback(graph: AnnotatedGraph) -> Suggestion:
    operators = [n for n in graph.nodes if n.is_float]
    return Suggestion(
        f"{graph_title(graph.name)} {graph.fallback}",
        "change that code, or keep the module that it is in out of the conversion",
        len(operators),
        sum(n.traffic for n in operators),
        sum(n.flops for n in operators),
    )


def _break(reason: str) -> Suggestion:
    return Suggestion(
        f"the graph breaks at {reason}",
        "move that code out of forward, or write it with tensor operators; casts at a break "
        "cannot be saved",
        0,
        0,
        0,
    )
