"""Place casts: choose the precision of every free node so that the fewest bytes move.

    mm -> gelu -> mm2         gelu free, both neighbours low:    gelu low, no cast
    mm -> view -> softmax     view free, softmax float32:        one cast, before or after view
    x  -> expand -> mm        expand free, x small:              cast x, then expand

Nodes that are painted ALLOW compute in low precision, DENY and KEEP nodes as captured. The rest
is a minimum cut: low on the source side, float32 on the sink side. A value pays once for all its
readers, through one auxiliary node per direction:

    producer --bytes--> up(value) --inf--> each reader      cut when the producer is low
    each reader --inf--> down(value) --bytes--> producer    cut when the producer is float32

and a free node pays for the traffic it would cause in float32. A cast costs a byte more than it
moves, so that of equal cuts the one with fewer casts is taken; one of a parameter does not, as it
can be lifted out of the graph (see `lift_weights`). Each connected free region is solved on its
own; equal cuts fall to float32. (The construction is the one of project selection,
Picard 1976; auxiliary nodes for shared transfers as in Stone 1977.)

Nodes go by their numbers in graph order, as in the flow graph. Of `size` nodes, value n has the
auxiliary nodes n + size (up) and n + 2 * size (down).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import networkx as nx
from networkx.algorithms.flow import shortest_augmenting_path

from amp_graph.flow import takes_either
from amp_graph.ir import FREE, Color, NodeFacts, Paint

CAST_BYTES = 4 + 2  # read one precision, write the other
TRAFFIC_BYTES = 2  # what an element costs more in float32, each time it is read or written
LOW, FLOAT32 = -1, -2  # source and sink

Facts = Sequence[NodeFacts]
Paints = Sequence[Paint]


def place_casts(
    facts: Mapping[str, NodeFacts], flow: nx.DiGraph, paints: Mapping[str, Paint]
) -> frozenset[str]:
    """Return the names of the nodes that compute in low precision."""
    nodes, painted = tuple(facts.values()), [paints[name] for name in facts]
    units = _units(nodes, flow, painted)
    low = {n for n, p in enumerate(painted) if p.color is Color.ALLOW}
    network = _network(nodes, flow, painted, units)
    for region in _regions(network):
        low |= _cut(network, region)
    return frozenset(f.name for n, f in enumerate(nodes) if n in low or units.get(n) in low)


def traffic(f: NodeFacts, read: Iterable[NodeFacts]) -> int:
    """Return how many bytes more a node moves in float32 than in low precision; 0 for a view."""
    if f.is_view or f.op == "getitem":
        return 0
    return TRAFFIC_BYTES * (f.numel + sum(r.numel for r in read))


def needs_cast(
    facts: Facts, flow: nx.DiGraph, paints: Paints, value: int, reader: int, is_low: bool
) -> bool:
    """Whether a reader needs the value cast, when the two are on different sides. `is_low`: the
    reader's side."""
    if facts[reader].op == "getitem":
        return False
    return not takes_either(facts, paints, value, reader, flow.predecessors(reader), is_low)


def _units(facts: Facts, flow: nx.DiGraph, paints: Paints) -> dict[int, int]:
    """Map each free node to the representative of those it must share a precision with: an operator
    and its results, and all nodes that live in one piece of written memory."""
    free = [n for n, p in enumerate(paints) if p.color in FREE]
    number = {f.name: n for n, f in enumerate(facts) if f.written}
    together = nx.Graph()
    for n, f in enumerate(facts):
        if f.op == "getitem":
            together.add_edges_from((n, parent) for parent in flow.predecessors(n))
        elif f.written and paints[n].color in FREE:
            together.add_edge(n, number[f.memory])
    units = {n: n for n in free}
    for group in nx.connected_components(together):
        fixed = [n for n in group if paints[n].color not in FREE]
        representative = fixed[0] if fixed else min(group)
        units.update({n: representative for n in group if paints[n].color in FREE})
    return units


def _network(
    facts: Facts, flow: nx.DiGraph, paints: Paints, units: Mapping[int, int]
) -> nx.DiGraph:
    """The flow network of all free nodes. An edge of infinite capacity cannot be cut."""
    network, size = nx.DiGraph(), len(facts)

    def side(n: int) -> int:
        unit = units.get(n, n)
        if paints[unit].color in FREE:
            return unit
        return LOW if paints[unit].color is Color.ALLOW else FLOAT32

    for n, unit in units.items():
        if side(n) == unit:
            network.add_node(unit)
            _add(network, LOW, unit, traffic(facts[n], (facts[r] for r in flow.predecessors(n))))

    def readers(value: int, is_low: bool) -> set[int]:
        """Return the sides of the readers that would need the value cast, were they on the side
        `is_low`."""
        needing = (
            r for r in flow.successors(value) if needs_cast(facts, flow, paints, value, r, is_low)
        )
        return {side(r) for r in needing} - {FLOAT32 if is_low else LOW, side(value)}

    for n, f in enumerate(facts):
        producer = side(n)
        if {producer, *map(side, flow.successors(n))} <= {LOW, FLOAT32}:
            continue
        bytes_moved = max(1, f.numel * CAST_BYTES + (not f.is_weight))
        up, down = n + size, n + 2 * size
        if producer != FLOAT32 and (in_float32 := readers(n, is_low=False)):
            rounds = paints[n].wide and producer != LOW
            _add(network, producer, up, math.inf if rounds else bytes_moved)
            for reader in in_float32:
                _add(network, up, reader, math.inf)
        if producer != LOW and (in_low := readers(n, is_low=True)):
            _add(network, down, producer, bytes_moved)
            for reader in in_low:
                _add(network, reader, down, math.inf)
    return network


def _add(network: nx.DiGraph, tail: int, head: int, capacity: float) -> None:
    """Add capacity to an edge."""
    if tail != head:
        before = network.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        network.add_edge(tail, head, capacity=before + capacity)


def _regions(network: nx.DiGraph) -> list[set[int]]:
    inner = nx.Graph(edge for edge in network.edges if not {LOW, FLOAT32}.intersection(edge))
    inner.add_nodes_from(n for n in network if n not in (LOW, FLOAT32))
    return [set(region) for region in nx.connected_components(inner)]


def _cut(network: nx.DiGraph, region: set[int]) -> set[int]:
    """Return the nodes of one region that a minimum cut puts on the low side: the fewest
    possible."""
    problem = nx.DiGraph()
    problem.add_nodes_from((LOW, FLOAT32))
    problem.add_edges_from(network.out_edges(region, data=True))
    problem.add_edges_from(network.in_edges(region, data=True))
    residual = shortest_augmenting_path(problem, LOW, FLOAT32)
    open_edges = ((u, v) for u, v, e in residual.edges(data=True) if e["flow"] < e["capacity"])
    low: set[int] = nx.descendants(nx.DiGraph([*open_edges, (LOW, LOW)]), LOW)
    return low


def cast_bytes(
    facts: Mapping[str, NodeFacts],
    flow: nx.DiGraph,
    paints: Mapping[str, Paint],
    low: Container[str],
) -> int:
    """Return the bytes that casts move if each value is cast once for all readers on the other
    side."""
    nodes, painted = tuple(facts.values()), [paints[name] for name in facts]
    is_low = [name in low for name in facts]
    return sum(
        f.numel * CAST_BYTES
        for n, f in enumerate(nodes)
        if any(
            is_low[r] is not is_low[n] and needs_cast(nodes, flow, painted, n, r, is_low[r])
            for r in flow[n]
        )
    )
