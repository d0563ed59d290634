"""Paint: give every node a colour and the reason for it.

    x -> mm -> exp -> add -> mm2        mm, mm2  ALLOW  "listed"
                                        exp      DENY   "listed"
                                        add      DENY   "downstream of", because exp

The rules stand in the order in which they apply: those of single nodes, then those that follow
the flow of values, each of which sees the colours given before it and returns new ones. What no
rule paints is free: it keeps its list's colour, INFER or CLEAR, and `place_casts` chooses its
precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import networkx as nx
import torch

from amp_graph.flow import huge_values, wide_values
from amp_graph.ir import Color, Level, NodeFacts, Paint
from amp_graph.oplists import OpLists
from amp_graph.passes.node_rules import NODE_RULES
from amp_graph.passes.scene import FREE, Facts, Paints, Rule, Scene
from amp_graph.policy import Policy


def paint(
    facts: Facts,
    flow: nx.DiGraph,
    lists: OpLists,
    policy: Policy,
    dtype: torch.dtype,
    saved: Mapping[str, Paint] | None = None,
    refused: Collection[str] = (),
) -> Paints:
    """Return a Paint for every node, in graph order. `saved` has decisions that beat the lists,
    `refused` the nodes whose kernels were seen not to take `dtype`."""
    operators = (f for f in facts.values() if f.op != "getitem")
    overrides = {f.name: o for f in operators if (o := policy.override_for(f))}
    level = Level(policy.level)
    scene = Scene(facts, flow, lists, dtype, level, overrides, saved or {}, refused)
    painted: Paints = {}
    for rule in RULES:
        painted.update(rule(scene, painted))
    wide, huge = _wide(scene, painted)[0], huge_values(facts, scene.colors, dtype)
    paints: Paints = {}
    for name in facts:
        given = painted.get(name) or _free(scene, name)
        is_plain = name not in wide and name not in huge
        paints[name] = given if is_plain else replace(given, wide=name in wide, huge=name in huge)
    return paints


def _free(scene: Scene, name: str) -> Paint:
    color, f = scene.colors[name], scene.facts[name]
    assert color in FREE, f"no rule painted {name} ({f.op})"
    return Paint(color, "float32 math inside" if f.storage else "free", f.group)


def one_by_one(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Of the rules for single nodes, the first that paints a node."""
    paints: Paints = {}
    for name, f in scene.facts.items():
        for rule in NODE_RULES:
            given = rule(scene, f)
            if given is not None:
                paints[name] = given
                break
    return paints


def deny_spreads(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Deny walks downstream through infer, and through clear that leads to infer; an allow
    operator, one on no list, or one whose result is bounded stops it. At level max it stays where
    it is."""
    if scene.level is Level.MAX:
        return {}
    unsafe: dict[str, str] = {}  # node -> the denied ancestor
    clear_between: list[str] = []
    paints: Paints = {}
    for name, f in scene.facts.items():  # graph order is topological
        if name in painted:
            if _spreads(f, painted[name]):
                unsafe[name] = name
            continue
        ancestor = next((unsafe[p] for p in f.reads if p in unsafe), None)
        if ancestor is None:
            continue
        if not f.bounded:
            unsafe[name] = ancestor
        if scene.colors[name] is Color.INFER:
            paints[name] = Paint(Color.DENY, "downstream of", ancestor)
        else:
            clear_between.append(name)
    for name in reversed(clear_between):
        if any(reader in paints for reader in scene.flow.successors(name)):
            paints[name] = Paint(Color.DENY, "downstream of", unsafe[name])
    return paints


def _spreads(f: NodeFacts, painted: Paint) -> bool:
    chosen = painted.rule in ("listed", "override", "user cast", "constant out of range")
    return painted.color is Color.DENY and chosen and not f.bounded


def wide_operands(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """An infer operator may be low only if something low reaches it and nothing wide does.

    PyTorch promotes a mix of float32 and low precision to float32, as at a residual stream that
    began with an embedding, and so does this rule, unless streams are narrowed: a sum is no more
    exact than its low operand.
    """
    return {
        name: Paint(Color.DENY, "promoted by" if operand else "nothing low upstream", operand or "")
        for name, operand in _wide(scene, painted)[1].items()
        if name not in painted
    }


def _wide(scene: Scene, painted: Mapping[str, Paint]) -> tuple[set[str], dict[str, str | None]]:
    """See `wide_values`. At level max no value is kept for its digits."""
    if scene.level is Level.MAX:
        return set(), {}
    colors = dict(scene.colors) | {n: p.color for n, p in painted.items()}
    return wide_values(scene.facts, colors, scene.narrowed, scene.narrows_streams)


def follow_parent(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """One result out of several has the colour of the operator that returned them all."""
    paints: Paints = {}
    for name, f in scene.facts.items():
        if f.op == "getitem" and name not in painted:
            for parent in f.reads:
                given = painted.get(parent) or paints.get(parent)
                if given is not None:
                    paints[name] = Paint(given.color, "result of", parent)
    return paints


def shared_memory(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Views and in-place results of one piece of written memory, and what writes into it, have
    one precision: float32 if any of them must, else low if any must. The operator that made the
    memory keeps its colour."""
    paints: Paints = {}
    for owner, names in _members(scene).items():
        colors = {n: painted[n].color for n in names if n in painted}
        float32 = next((n for n, c in colors.items() if c in (Color.DENY, Color.KEEP)), None)
        low = next((n for n, c in colors.items() if c is Color.ALLOW), None)
        decided = Color.DENY if float32 else Color.ALLOW
        for name in names if float32 or low else ():
            is_settled = colors.get(name) in (decided, Color.KEEP)
            if not is_settled and (name != owner or owner not in painted):
                paints[name] = Paint(decided, "shares memory with", str(float32 or low))
    return paints


def _members(scene: Scene) -> dict[str, list[str]]:
    """By the owner of each memory that is written and not an input's: what lives in it or writes
    into it."""
    members: dict[str, list[str]] = {}
    for name, f in scene.facts.items():
        for owner in dict.fromkeys((f.memory, *f.writes)) if f.written or f.writes else ():
            if scene.facts[owner].written and not scene.facts[owner].external:
                members.setdefault(owner, []).append(name)
    return members


RULES: tuple[Rule, ...] = (
    one_by_one,
    deny_spreads,
    wide_operands,
    follow_parent,
    shared_memory,
)
