"""Paint: give every node a colour and the reason for it.

    x -> mm -> exp -> add -> mm2        mm, mm2  ALLOW  "listed"
                                        exp      DENY   "listed"
                                        add      DENY   "downstream of", because exp

The rules stand in the order in which they apply; each sees the colours given before it and
returns new ones for nodes that have none. What no rule paints is free: it keeps its list's
colour, INFER or CLEAR, and `place_casts` chooses its precision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import networkx as nx
import torch

from amp_graph.flow import huge_values, returned, wide_values
from amp_graph.ir import Color, Level, NodeFacts, Paint
from amp_graph.oplists import OpLists
from amp_graph.policy import Policy

Facts = Mapping[str, NodeFacts]
Overrides = Mapping[str, tuple[Color, str]]
FREE = (Color.INFER, Color.CLEAR)


@dataclass(frozen=True)
class Scene:
    """What every rule may look at. `flow` has an edge for each float32 value and its reader;
    `colors` is the list colour of each node, the user's overrides applied."""

    facts: Facts
    flow: nx.DiGraph
    colors: Mapping[str, Color | None]
    overrides: Overrides
    lists: OpLists
    dtype: torch.dtype
    saved: Mapping[str, Paint]
    level: Level

    @property
    def narrows_streams(self) -> bool:
        """Whether a sum of float32 and low precision may be low, unlike in PyTorch's promotion:
        not in float16, whose range a stream may outgrow, nor on CPU, where layer norms stay in
        float32 and would each cast it."""
        on_cpu = any(t.device == "cpu" for f in self.facts.values() for t in f.tensors)
        return self.level is Level.BALANCED and self.dtype is torch.bfloat16 and not on_cpu


Paints = dict[str, Paint]
Rule = Callable[[Scene, Mapping[str, Paint]], Paints]


def paint(
    facts: Facts,
    flow: nx.DiGraph,
    lists: OpLists,
    policy: Policy,
    dtype: torch.dtype,
    saved: Mapping[str, Paint] | None = None,
) -> Paints:
    """Return a Paint for every node, in graph order. `saved` has decisions that beat the lists."""
    operators = (f for f in facts.values() if f.op != "getitem")
    overrides = {f.name: o for f in operators if (o := policy.override_for(f))}
    level = Level(policy.level)
    colors = _colors(facts, overrides, level)
    scene = Scene(facts, flow, colors, overrides, lists, dtype, saved or {}, level)
    painted: Paints = {}
    for rule in RULES:
        painted.update(rule(scene, painted))
    wide, huge = _wide(scene, painted)[0], huge_values(facts, scene.colors, dtype)
    paints = {name: painted.get(name) or _free(scene, name) for name in facts}
    return paints | {
        name: replace(paints[name], wide=name in wide, huge=name in huge) for name in wide | huge
    }


def _colors(facts: Facts, overrides: Overrides, level: Level) -> dict[str, Color | None]:
    """List colours with the user's overrides. An operator that computes in float32 on low-precision
    tensors is as free as an infer one, unless its result, say of a last softmax, is returned."""
    kept = set() if level is Level.MAX else set(returned(facts))
    narrowed = {n for n, f in facts.items() if level.includes(f.storage) and n not in kept}
    colors = {n: Color.INFER if n in narrowed else f.color for n, f in facts.items()}
    colors.update((name, color) for name, (color, _) in overrides.items())
    return colors


def _free(scene: Scene, name: str) -> Paint:
    color, f = scene.colors[name], scene.facts[name]
    assert color in FREE, f"no rule painted {name} ({f.op})"
    return Paint(color, "float32 math inside" if f.storage else "free", f.group)


def fixed_as_captured(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Nothing to convert, or precision that the model's own code chose."""
    return {n: Paint(Color.KEEP, "as captured", f.fixed) for n, f in scene.facts.items() if f.fixed}


def written_inputs(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Memory that came from outside and is written to stays what the caller handed over."""
    return {
        f.name: Paint(Color.DENY, "writes into", f.memory)
        for f in _open(scene, painted)
        if f.written and f.external
    }


def shared_outputs(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Outputs that share memory with an input or with one another go on sharing it. The operator
    that made the memory may compute low all the same; its result is then cast on the spot."""
    count = Counter(scene.facts[name].memory for name in returned(scene.facts))
    sharing = [
        f
        for f in _open(scene, painted)
        if count[f.memory] > (0 if f.external else 1)
        if f.is_view or scene.colors[f.name] is not Color.ALLOW
    ]
    paints = {}
    for f in sharing:
        given = Paint(Color.DENY, "output shares memory with", f.memory, shares=True)
        paints.update(dict.fromkeys((f.name, *(f.reads if f.op == "getitem" else ())), given))
    return paints


def missing_kernels(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    paints = {}
    for f in _open(scene, painted, Color.ALLOW, *FREE):
        device = f.tensors[0].device if f.tensors else "cpu"
        if not scene.lists.has_kernel(f.op, device, scene.dtype):
            paints[f.name] = Paint(Color.DENY, "no kernel", f"{f.op} on {device}")
    return paints


def saved_decisions(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """The colours of a plan that was saved, and perhaps edited, hold as they are."""
    return {n: p for n, p in scene.saved.items() if n not in painted}


def user_overrides(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    return {
        name: Paint(color, "override", because)
        for name, (color, because) in scene.overrides.items()
        if name not in painted and color not in FREE
    }


def user_casts(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """An explicit `.float()` asks for float32 from there on."""
    return {
        f.name: Paint(Color.DENY, "user cast", "the model converts to float32")
        for f in _open(scene, painted)
        if f.user_cast
    }


def unrepresentable_numbers(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """A constant that overflows or vanishes in low precision (a mask value, an epsilon)."""
    info = torch.finfo(scene.dtype)
    paints = {}
    for f in _open(scene, painted, *FREE):
        for number in f.scalars:
            size = abs(number)
            if math.isfinite(size) and size and not info.smallest_normal <= size <= info.max:
                paints[f.name] = Paint(Color.DENY, "constant out of range", f"{number:g}")
    return paints


def listed(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """Allow, deny, and operators on no list."""
    paints = {}
    for f in _open(scene, painted, Color.ALLOW, Color.DENY, None):
        color = scene.colors[f.name]
        unlisted = Paint(Color.DENY, "on no list", f.op)
        paints[f.name] = Paint(color, "listed", f.group) if color else unlisted
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
    colors = {n: painted[n].color if n in painted else c for n, c in scene.colors.items()}
    narrowed = {n for n, f in scene.facts.items() if scene.level.includes(f.storage)}
    return wide_values(scene.facts, colors, narrowed, scene.narrows_streams)


def follow_parent(scene: Scene, painted: Mapping[str, Paint]) -> Paints:
    """One result out of several has the colour of the operator that returned them all."""
    paints: Paints = {}
    for f in _open(scene, painted):
        for parent in f.reads if f.op == "getitem" else ():
            given = painted.get(parent) or paints.get(parent)
            if given is not None:
                paints[f.name] = Paint(given.color, "result of", parent)
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
        for owner in dict.fromkeys((f.memory, *f.writes)):
            if scene.facts[owner].written and not scene.facts[owner].external:
                members.setdefault(owner, []).append(name)
    return members


def _open(scene: Scene, painted: Mapping[str, Paint], *colors: Color | None) -> Iterator[NodeFacts]:
    """The nodes not painted yet, of these list colours if any are given."""
    for name, f in scene.facts.items():
        if name not in painted and (not colors or scene.colors[name] in colors):
            yield f


RULES: tuple[Rule, ...] = (
    fixed_as_captured,
    written_inputs,
    shared_outputs,
    missing_kernels,
    saved_decisions,
    user_overrides,
    user_casts,
    unrepresentable_numbers,
    listed,
    deny_spreads,
    wide_operands,
    follow_parent,
    shared_memory,
)
