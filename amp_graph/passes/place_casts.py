"""Place casts: choose the precision of every free node so that the fewest bytes move.

    mm -> gelu -> mm2         gelu free, both neighbours low:    gelu low, no cast
    mm -> view -> softmax     view free, softmax float32:        one cast, before or after view
    x  -> expand -> mm        expand free, x small:              cast x, then expand

Nodes that are painted ALLOW compute in low precision, DENY and KEEP nodes as captured. The rest
is a minimum cut: low on the source side, float32 on the sink side. A value pays once for all its
readers, through one auxiliary node per direction:

    producer --bytes--> up(value) --inf--> each reader      cut when the producer is low
    each reader --inf--> down(value) --bytes--> producer    cut when the producer is float32

and a free node pays for the traffic it would cause in float32. A cast of a parameter costs a byte
less than it moves, so that of equal cuts the one is taken whose casts can be lifted out of the
graph (see `lift_weights`). Each connected free region is solved on its own; equal cuts fall to
float32. (The construction is the one of project selection,
Picard 1976; auxiliary nodes for shared transfers as in Stone 1977.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov

from amp_graph.ir import Cast, Color, NodeFacts, Paint, takes_either

CAST_BYTES = 4 + 2  # read one precision, write the other
TRAFFIC_BYTES = 2  # what an element costs more in float32, each time it is read or written
LOW, FLOAT32 = ("low",), ("float32",)  # source and sink; no node name is a tuple

Facts = Mapping[str, NodeFacts]
Paints = Mapping[str, Paint]


def place_casts(
    facts: Facts, flow: nx.DiGraph, paints: Paints, dtype: torch.dtype
) -> tuple[frozenset[str], tuple[Cast, ...]]:
    """Return the names of the nodes that compute in `dtype`, and the casts that this needs."""
    units = _units(facts, flow, paints)
    low = {name for name, p in paints.items() if p.color is Color.ALLOW}
    network = _network(facts, flow, paints, units)
    for region in _regions(network):
        low |= _cut(network, region)
    low_nodes = frozenset(n for n in facts if n in low or units.get(n) in low)
    return low_nodes, casts_for(facts, flow, paints, low_nodes, dtype)


def casts_for(
    facts: Facts, flow: nx.DiGraph, paints: Paints, low: Iterable[str], dtype: torch.dtype
) -> tuple[Cast, ...]:
    """The casts that a choice of low nodes needs: one per value and direction."""
    low = frozenset(low)
    casts = []
    for name, f in facts.items():
        readers = [r for r in flow.successors(name) if (r in low) != (name in low)]
        readers = [r for r in readers if _needs_cast(facts, paints, name, r, r in low)]
        if readers:
            target = torch.float32 if name in low else dtype
            saturate = name not in low and paints[name].huge
            size = f.numel * CAST_BYTES
            casts.append(Cast(name, target, tuple(readers), size, saturate, f.is_weight))
    return tuple(casts)


def traffic(f: NodeFacts, facts: Facts) -> int:
    """Bytes that a node moves more in float32 than in low precision; a view moves none."""
    if f.is_view or f.op == "getitem":
        return 0
    return TRAFFIC_BYTES * (f.numel + sum(facts[r].numel for r in f.reads))


def _needs_cast(facts: Facts, paints: Paints, value: str, reader: str, is_low: bool) -> bool:
    return facts[reader].op != "getitem" and not takes_either(facts, paints, value, reader, is_low)


def _units(facts: Facts, flow: nx.DiGraph, paints: Paints) -> dict[str, str]:
    """Free nodes that must share a precision, by a representative: a node and its results, and
    all that lives in one piece of written memory."""
    together = nx.Graph()
    for name, f in facts.items():
        if f.op == "getitem":
            together.add_edges_from((name, parent) for parent in flow.predecessors(name))
        elif f.written and _is_free(paints[name]):
            together.add_edge(name, f.memory)
    units = {name: name for name in facts if _is_free(paints[name])}
    for group in nx.connected_components(together):
        fixed = [n for n in group if not _is_free(paints[n])]
        representative = fixed[0] if fixed else min(group)
        units.update({n: representative for n in group if _is_free(paints[n])})
    return units


def _is_free(painted: Paint) -> bool:
    return painted.color in (Color.INFER, Color.CLEAR)


def _network(
    facts: Facts, flow: nx.DiGraph, paints: Paints, units: Mapping[str, str]
) -> nx.DiGraph:
    """The flow network of all free nodes. An edge without capacity cannot be cut."""
    network = nx.DiGraph()

    def side(name: str) -> object:
        unit = units.get(name, name)
        if _is_free(paints[unit]):
            return unit
        return LOW if paints[unit].color is Color.ALLOW else FLOAT32

    for name, unit in units.items():
        if side(name) == unit:
            network.add_node(unit)
            _add(network, LOW, unit, traffic(facts[name], facts))

    def readers(value: str, is_low: bool) -> set[object]:
        """The sides of those that would need the value cast if they were low, or float32."""
        needing = (
            r for r in flow.successors(value) if _needs_cast(facts, paints, value, r, is_low)
        )
        return {side(r) for r in needing} - {LOW if not is_low else FLOAT32, side(value)}

    for name, f in facts.items():
        producer = side(name)
        if {producer, *map(side, flow.successors(name))} <= {LOW, FLOAT32}:
            continue
        bytes_moved = max(0, f.numel * CAST_BYTES - f.is_weight)
        up, down = ("up", name), ("down", name)
        if producer != FLOAT32 and (in_float32 := readers(name, is_low=False)):
            rounds = paints[name].wide and producer != LOW
            _add(network, producer, up, None if rounds else bytes_moved)
            for reader in in_float32:
                _add(network, up, reader, None)
        if producer != LOW and (in_low := readers(name, is_low=True)):
            _add(network, down, producer, bytes_moved)
            for reader in in_low:
                _add(network, reader, down, None)
    return network


def _add(network: nx.DiGraph, tail: object, head: object, capacity: int | None) -> None:
    """Add capacity to an edge; None makes it uncuttable."""
    if tail == head:
        return
    if capacity is None:
        network.add_edge(tail, head)
        network.edges[tail, head].pop("capacity", None)
    elif not network.has_edge(tail, head):
        network.add_edge(tail, head, capacity=capacity)
    elif "capacity" in network.edges[tail, head]:
        network.edges[tail, head]["capacity"] += capacity


def _regions(network: nx.DiGraph) -> list[set[object]]:
    inner = nx.Graph(edge for edge in network.edges if not {LOW, FLOAT32}.intersection(edge))
    inner.add_nodes_from(n for n in network if n not in (LOW, FLOAT32))
    return [set(region) for region in nx.connected_components(inner)]


def _cut(network: nx.DiGraph, region: set[object]) -> set[str]:
    """The nodes of one region that a minimum cut puts on the low side, as few as possible."""
    problem = nx.DiGraph()
    problem.add_nodes_from((LOW, FLOAT32))
    problem.add_edges_from(network.out_edges(region, data=True))
    problem.add_edges_from(network.in_edges(region, data=True))
    residual = boykov_kolmogorov(problem, LOW, FLOAT32)
    open_edges = ((u, v) for u, v, e in residual.edges(data=True) if e["flow"] < e["capacity"])
    reachable = nx.descendants(nx.DiGraph([*open_edges, (LOW, LOW)]), LOW)
    return {node for node in reachable if isinstance(node, str)}
