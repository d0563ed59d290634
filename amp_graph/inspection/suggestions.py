"""Suggestions: changes by which a user could run more in low precision, the most rewarding first.

Every operator that stays in float32 is counted under the decision at the end of its chain of
reasons: an operator on no list, a denied ancestor, a float32 value that it reads, a cast in the
model's own code, an override. The changes that would free most, if all of these became low, are
tried, and what they free is counted. A change is not told if it frees nothing, or if its casts move
more bytes than are saved where there are no products.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from amp_graph.inspection.annotated import AnnotatedGraph, AnnotatedNode
from amp_graph.inspection.source import AnnotatedModel
from amp_graph.inspection.spelling import byte_count, count, flop_count, graph_title, line_of
from amp_graph.inspection.trials import Gain, Grounds, Trials
from amp_graph.ir import NodeFacts
from amp_graph.listing import FLAGS, OTHER_DEVICES, Listing
from amp_graph.oplists import OpLists
from amp_graph.override import Override
from amp_graph.rules import Rule

FLOPS_PER_BYTE = 50  # how many cost as much time as a byte; the order is insensitive to it
SHOWN = 3
TRIED = 5  # changes, the most promising first,
NODES = 20_000  # and none more once so many nodes were painted anew, which takes a second or two
SCALAR = "()"  # the shape of a number, which promotes nothing

Found: TypeAlias = list[tuple[AnnotatedNode, AnnotatedNode]]


@dataclass(frozen=True)
class Change:
    """A change: its subject, how to make it, and the grounds of decisions after it."""

    what: str
    how: str
    then: Grounds


Tell: TypeAlias = Callable[[Found, Grounds], Change]


@dataclass(frozen=True)
class Suggestion:
    """A change and its gain: its subject, how to make it, and what it would free.

    bytes: how many fewer the freed operators move. `cast_bytes`: how many more casts move.
    """

    what: str
    how: str
    nodes: int = 0
    bytes: int = 0
    flops: int = 0
    cast_bytes: int = 0

    @property
    def gain(self) -> str:
        parts = [count(self.nodes, "operator")]
        parts += [f"{_more(-self.bytes)} for them to move"] if self.bytes else []
        parts += [f"{_more(self.cast_bytes)} for casts"] if self.cast_bytes else []
        parts += [f"{flop_count(self.flops)} in low precision"] if self.flops > 0 else []
        return ", ".join(parts)


def _more(size: int) -> str:
    return f"{byte_count(abs(size))} {'more' if size > 0 else 'less'}"


def suggestions(model: AnnotatedModel) -> tuple[Suggestion, ...]:
    """At most three, best first."""
    trials = Trials(model)
    everything = [g for graph in model.after for g in graph.everything()]
    found = [_fallback(graph, trials) for graph in everything if graph.fallback]
    if len(found) < SHOWN:
        found += sorted(filter(_pays, _tried(trials)), key=lambda s: -_worth(s))
    found += [_break(reason) for reason in model.breaks]
    return tuple(found[:SHOWN])


def _tried(trials: Trials) -> Iterator[Suggestion]:
    """Yield the changes that promise most, with their gains."""
    groups = _groups(trials.graphs)
    promised = {key: sum(map(_promise, found)) for key, found in groups.items()}
    best = sorted((key for key in groups if promised[key]), key=lambda key: -promised[key])
    for key in best[:TRIED]:
        if trials.painted >= NODES:
            return
        change = key[0](groups[key], trials.now)
        yield _suggestion(change.what, change.how, trials.gain(change.then))


def _promise(found: tuple[AnnotatedNode, AnnotatedNode]) -> float:
    node, _ = found
    return node.traffic + node.flops / FLOPS_PER_BYTE


def _pays(s: Suggestion) -> bool:
    """Products do, whatever is cast for them: the allow list goes by that."""
    return s.nodes > 0 and (s.flops > 0 or _worth(s) > 0)


def _worth(s: Suggestion) -> float:
    return s.bytes - s.cast_bytes + s.flops / FLOPS_PER_BYTE


def _groups(graphs: Iterable[AnnotatedGraph]) -> dict[tuple[Tell, str], Found]:
    """Return the nodes that stay in float32, each with the decision at the end of its chain of
    reasons, by the change that would free them."""
    groups: dict[tuple[Tell, str], Found] = defaultdict(list)
    for graph in graphs:
        nodes = {n.name: n for n in graph.nodes}
        reached: set[str] = set()  # by something low, if what is denied did not spread
        for node in graph.nodes:
            if node.is_float and not node.low and node.chain:
                root = nodes.get(node.chain[-1].node, node)
                key = _key(node, root)
                if key is None or (key[0] is _spread and not _is_freed(node, root, nodes, reached)):
                    continue
                reached.add(node.name)
                groups[key].append((node, root))
    return groups


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
    """Return the change that would free a node, and the decision that the node shares with
    others."""
    if root.rule == Rule.UNLISTED:
        return _unlisted, root.op
    if node.rule == Rule.PROMOTED:
        return _promoted, root.name
    if root.rule == Rule.LISTED and node is not root:
        return _spread, root.op
    if root.rule == Rule.USER_CAST:
        return _user_cast, root.source
    return (TELL[root.rule], root.why) if root.rule in TELL else None


def _at(node: AnnotatedNode) -> str:
    line = line_of(node.source)
    return f" at {line}" if line else ""


def _unlisted(found: Found, now: Grounds) -> Change:
    op = found[0][1].op
    lists = {"infer": [op]}
    return Change(
        f"{op} is on no list, so it stays in float32",
        f"if it is safe on well-behaved values: Policy(lists={json.dumps(lists)})",
        replace(now, lists=now.lists.merged(lists)),
    )


def _spread(found: Found, now: Grounds) -> Change:
    root = found[0][1]
    lists = {"deny": {"mine": _bounded(now.lists, root.op)}}
    spelled = json.dumps(lists).replace(": true", ": True")
    return Change(
        f"{root.label} ({root.op}{_at(root)}) is denied, and what computes on its values with it",
        f"if its values stay in a small range: Policy(lists={spelled})",
        replace(now, lists=now.lists.merged(lists)),
    )


def _bounded(lists: OpLists, op: str) -> dict[str, Any]:
    """The entry of an operator, as bounded, with what else its own one says, but for what a user's
    entry is taken to say."""
    listing = lists.lookup(op if op.count(".") > 1 else f"{op}.default")
    entry: dict[str, Any] = {"why": "...", "bounded": True}
    for field in fields(Listing):
        value = getattr(listing, field.name, None)
        if field.name in FLAGS and value:
            entry[field.name] = True
        elif field.name == "storage" and value:
            levels = {where: level.value for where, level in value.items()}
            entry["storage"] = levels[OTHER_DEVICES] if [*levels] == [OTHER_DEVICES] else levels
    return entry | {"ops": [op]}


def _promoted(found: Found, now: Grounds) -> Change:
    root = found[0][1]
    names = [*dict.fromkeys(node.name for node, _ in found)]  # alike in several graphs
    if len(names) == 1:
        overrides = f'(Override("allow", name="{names[0]}"),)'
    else:
        overrides = f'[Override("allow", name=n) for n in {json.dumps(names)}]'
    all_names = {*names}
    allowed = Override("allow", where=lambda f: f.name in all_names)
    policy = replace(now.policy, overrides=(allowed, *now.policy.overrides))
    return Change(
        f"{root.label}{_at(root)} holds full float32, and operators that also read it follow",
        f"if its last digits do not matter: Policy(overrides={overrides})",
        replace(now, policy=policy),
    )


def _user_cast(found: Found, now: Grounds) -> Change:
    root = found[0][1]
    return Change(
        f"the model converts to float32 by itself{_at(root)}: {root.code or root.op}",
        "remove that conversion, if it is there for float16 only",
        replace(now, edit=lambda f: _without_cast(f, root.source)),
    )


def _without_cast(f: NodeFacts, source: str) -> NodeFacts:
    is_that = f.user_cast and f.source == source
    return replace(f, user_cast=False, asked=False) if is_that else f


def _override(found: Found, now: Grounds) -> Change:
    because = found[0][1].because
    policy = now.policy
    kept = tuple(o for o in policy.overrides if str(o) != because)
    globs = tuple(g for g in policy.keep_float32 if f"keep_float32={g}" != because)
    return Change(
        f"an override keeps operators in float32: {because}",
        "remove the override, or narrow it for a part of that",
        replace(now, policy=replace(policy, overrides=kept, keep_float32=globs)),
    )


def _constant(found: Found, now: Grounds) -> Change:
    root = found[0][1]
    vanishes = abs(float(root.because)) < 1
    return Change(
        f"the constant {root.because} of {root.label}{_at(root)} is out of the low precision's "
        f"range",
        "use a larger one, which does not vanish: in float16 an epsilon of 1e-4, say"
        if vanishes
        else "use a constant within it, such as -1e4 or -inf for a mask",
        replace(now, edit=lambda f: _within_range(f, root.because)),
    )


def _within_range(f: NodeFacts, number: str) -> NodeFacts:
    if not any(f"{x:g}" == number for x in f.scalars):
        return f
    return replace(f, scalars=tuple(1.0 if f"{x:g}" == number else x for x in f.scalars))


def _no_kernel(found: Found, now: Grounds) -> Change:
    what, how = found[0][1].why, "use the other low precision, if it has a kernel there"
    return Change(what, how, replace(now, in_other_dtype=True))


TELL: dict[str, Tell] = {
    Rule.OVERRIDE: _override,
    Rule.OUT_OF_RANGE: _constant,
    Rule.NO_KERNEL: _no_kernel,
}


def _fallback(graph: AnnotatedGraph, trials: Trials) -> Suggestion:
    what = f"{graph_title(graph.name)} {graph.fallback}"
    how = "change that code, or keep the module that it is in out of the conversion"
    return _suggestion(what, how, trials.gain_of(graph))


def _suggestion(what: str, how: str, gain: Gain) -> Suggestion:
    return Suggestion(what, how, gain.nodes, gain.bytes, gain.flops, gain.cast_bytes)


def _break(reason: str) -> Suggestion:
    return Suggestion(
        f"the graph breaks at {reason}",
        "move that code out of forward, or write it with tensor operators; casts at a break "
        "cannot be saved",
    )
