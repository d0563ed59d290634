"""Our plans beside autocast, with what each of our casts is for, and beside a greedy fill.

The fill is that of TensorFlow's grappler on our painted colours. It is held to what binds us too:
values that go together have one precision, and no float32 reader gets a value rounded that was
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from unittest import mock

import networkx as nx
import torch
from cuda_autocast import Casts, autocast_casts
from torch import fx, nn

import amp_graph
from amp_graph.backend.rewrite import rewrite
from amp_graph.flow import flow_graph
from amp_graph.ir import FREE, Cast, Color, NodeFacts, Paint, Plan
from amp_graph.passes.place_casts import cast_bytes, traffic

INPUTS = ("placeholder", "get_attr")
Facts = Mapping[str, NodeFacts]
Paints = Mapping[str, Paint]


OUTPUT = "outputs stay float32"
BOUNDARY = "bodies take and return float32"
PROMOTION = "promotion, which kernels do themselves"
REDUCTION = "reductions, whose kernels widen"
KEPT = "operators that run as captured"
UNRULED = "float32 where autocast has no rule"
REASONS = (OUTPUT, BOUNDARY, PROMOTION, REDUCTION, KEPT, UNRULED)
# Autocast asks these for a float32 result and lets them read low precision.
WIDENING = ("sum", "prod", "cumsum", "cumprod", "norm")


def our_casts(plan: Plan, is_body: bool = False) -> Casts:
    """The casts of a plan and its bodies, each under the reason why autocast needs none, or
    under the operator that it is for."""
    found = Casts()
    flow = _named_flow(plan.facts)
    for cast in plan.casts:
        found.count += 1
        found.by_op[_asked_by(plan, flow, cast, is_body)] += cast.bytes
        found.weights += cast.is_weight
        found.weight_bytes += cast.bytes * cast.is_weight
    for body in plan.bodies.values():
        found += our_casts(body, is_body=True)
    return found


def _asked_by(plan: Plan, flow: nx.DiGraph, cast: Cast, is_body: bool) -> str:
    """The cast joins one operator whose precision was not free to another."""
    facts = plan.facts
    reader = facts[_walk(plan, cast.readers[0], flow.successors)]
    origin = _walk(plan, cast.value, flow.predecessors)
    while (
        plan.paints[origin].rule in ("promoted by", "downstream of") and plan.paints[origin].because
    ):
        origin = _walk(plan, plan.paints[origin].because, flow.predecessors)
    source = facts[origin]
    if reader.op == "output":
        return BOUNDARY if is_body else OUTPUT
    from_outside = is_body and source.op == "placeholder" and not source.is_parameter
    if from_outside or any("." not in op and op not in INPUTS for op in (source.op, reader.op)):
        return BOUNDARY
    if cast.dtype is not torch.float32:
        paint = plan.paints[origin]
        denied = paint.rule in ("listed", "saturates") and paint.color is Color.DENY
        return UNRULED if denied and not _has_rule(source.op) else reader.op
    mixed = any(n not in plan.low and not facts[n].is_scalar for n in reader.reads)
    if reader.op.startswith("aten.copy_.") or (reader.promotes and mixed):
        return PROMOTION
    if reader.op.split(".")[1] in WIDENING:
        return REDUCTION
    if plan.paints[reader.name].color is Color.KEEP:
        return KEPT
    return reader.op if _has_rule(reader.op) else UNRULED


def _has_rule(op: str) -> bool:
    name = op.replace(".", "::", 1).removesuffix(".default")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")


def _walk(plan: Plan, name: str, towards: Callable[[str], Iterable[str]]) -> str:
    while plan.paints[name].color in FREE or plan.facts[name].op == "getitem":
        following = next(iter(towards(name)), None)
        if following is None:
            break
        name = following
    return name


def excess(ours: Casts, theirs: Casts) -> dict[str, int]:
    """What our casts are for and autocast's are not, the most bytes first."""
    return dict((ours.by_op - theirs.by_op).most_common())


def unexplained(ours: Casts, theirs: Casts) -> int:
    """The bytes by which ours exceed autocast's after all that autocast leaves to kernels or to
    the reader of low-precision outputs."""
    return ours.bytes - sum(ours.by_op[reason] for reason in REASONS) - theirs.bytes


@dataclass
class Comparison:
    """All graphs of one model: casts of our plans and of autocast, and bytes moved by our choice
    of low nodes and by a greedy fill."""

    ours: Casts = field(default_factory=Casts)
    autocast: Casts = field(default_factory=Casts)
    moved: int = 0
    greedy_cast_bytes: int = 0
    greedy_moved: int = 0
    fallbacks: tuple[str, ...] = ()


def compare(model: nn.Module, args: tuple, kwargs: dict, policy: str = "bfloat16") -> Comparison:
    found = Comparison()
    for captured, plan in captured_plans(model, args, kwargs, policy):
        found.ours += our_casts(plan)
        found.autocast += autocast_casts(captured, plan.dtype)
        for part in with_bodies(plan):
            casts, moved = bytes_moved(part, greedy_fill(part.facts, part.paints))
            found.moved += bytes_moved(part, part.low)[1]
            found.greedy_cast_bytes += casts
            found.greedy_moved += moved
            found.fallbacks += (part.fallback,) if part.fallback else ()
    return found


def with_bodies(plan: Plan) -> Iterator[Plan]:
    yield plan
    for body in plan.bodies.values():
        yield from with_bodies(body)


def captured_plans(
    model: nn.Module, args: tuple, kwargs: dict, policy: str
) -> list[tuple[fx.GraphModule, Plan]]:
    """Convert a model, run it once, and return its captured graphs with their plans."""
    seen = []

    def recording(captured, *rest):
        emitted, plan = rewrite(captured, *rest)
        seen.append((captured, plan))
        return emitted, plan

    with mock.patch("amp_graph.backend.decide.rewrite", recording):
        amp_graph.convert(model, policy=policy)(*args, **kwargs)
    return seen


def bytes_moved(plan: Plan, low: frozenset[str]) -> tuple[int, int]:
    """Bytes of the casts that a choice of low nodes needs, and of these together with what the
    free nodes left in float32 move more than in low precision; without the bodies."""
    facts, paints = tuple(plan.facts.values()), tuple(plan.paints.values())
    flow, numbers = flow_graph(plan.facts), {n for n, f in enumerate(facts) if f.name in low}
    cast = cast_bytes(plan.facts, flow, plan.paints, low)
    free = [n for n, p in enumerate(paints) if p.color in FREE and n not in numbers]
    moved = (traffic(facts[n], [facts[r] for r in flow.predecessors(n)]) for n in free)
    return cast, cast + sum(moved)


def _named_flow(facts: Facts) -> nx.DiGraph:
    return nx.relabel_nodes(flow_graph(facts), dict(enumerate(facts)))


def greedy_fill(facts: Facts, paints: Paints) -> frozenset[str]:
    """Free nodes between two allow nodes turn low, then clear nodes beside a low one, until
    nothing changes; what would break a constraint goes back to float32."""
    flow = _named_flow(facts)
    low = {n for n, p in paints.items() if p.color is Color.ALLOW}
    above, below = set(low), set(low)
    for n in facts:
        if paints[n].color in FREE and above.intersection(flow.predecessors(n)):
            above.add(n)
    for n in reversed(list(facts)):
        if paints[n].color in FREE and below.intersection(flow.successors(n)):
            below.add(n)
    low |= above & below
    edge = list(low)
    while edge:
        name = edge.pop()
        for other in (*flow.predecessors(name), *flow.successors(name)):
            if other not in low and paints[other].color is Color.CLEAR:
                low.add(other)
                edge.append(other)
    return frozenset(_repaired(low, facts, paints, flow))


def _repaired(low: set[str], facts: Facts, paints: Paints, flow: nx.DiGraph) -> set[str]:
    groups = list(_groups(facts, paints))
    changed = True
    while changed:
        changed = False
        for group in groups:
            inside = {n for n in group if n in low}
            if inside and (inside != group or any(_rounds(n, low, paints, flow) for n in group)):
                free = {n for n in inside if paints[n].color in FREE}
                low -= free
                changed |= bool(free)
    return low


def _groups(facts: Facts, paints: Paints) -> Iterator[set[str]]:
    """A tuple with its parts, and all that lives in one piece of written memory."""
    together = nx.Graph()
    together.add_nodes_from(n for n in facts if paints[n].color in FREE)
    for name, f in facts.items():
        if paints[name].color in FREE and f.op == "getitem":
            together.add_edges_from((name, parent) for parent in f.reads)
        elif paints[name].color in FREE and f.written:
            together.add_edge(name, f.memory)
    yield from (set(group) for group in nx.connected_components(together))


def _rounds(name: str, low: set[str], paints: Paints, flow: nx.DiGraph) -> bool:
    """Whether a float32 reader would get a value rounded that still held full float32."""
    return (
        paints[name].wide
        and paints[name].color in FREE
        and any(r not in low for r in flow.successors(name))
    )
