"""The demands of readers on a value: its distance from a bound, its phase, a position, its digits.

Readers are seen through free operators, which only pass numbers on. Nodes go by their numbers in
graph order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import networkx as nx

from amp_graph.flow import SUMS
from amp_graph.ir import FREE, Color, NodeFacts
from amp_graph.levels import Level

if TYPE_CHECKING:
    from amp_graph.passes.analysis import AnalyzedGraph


def read_by(
    flow: nx.DiGraph, read: Iterable[tuple[int, int]], passes: Callable[[int], bool]
) -> dict[int, int]:
    """Map each value that is read to one of its readers, seen through operators that `passes`
    accepts."""
    found: dict[int, int] = {}
    unseen = [*read]
    while unseen:
        value, reader = unseen.pop()
        if value not in found:
            found[value] = reader
            if passes(value):
                unseen += ((v, reader) for v in flow.predecessors(value))
    return found


def operands_of(flow: nx.DiGraph, readers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield each operand of the readers, with its reader."""
    return ((value, n) for n in readers for value in flow.predecessors(n))


def read_near_bounds(graph: AnalyzedGraph) -> dict[int, int]:
    """Map each saturating operator that could be low to a reader of how far its result is from the
    bound.

    Such readers are float32 arithmetic (a logarithm), operators that order elements, and, for an
    output, code outside of the graph. They are seen through operators that read such results alone.
    Denying the operator costs nothing: a cast before it costs as much as one after it.
    """
    facts, flow, colors, level = graph.facts, graph.flow, graph.colors_by_lists, graph.level
    saturates: set[int] = set()
    made_of: set[int] = set()  # such results and what is computed of them alone
    for n, f in enumerate(facts):
        if f.saturates and colors[n] is Color.INFER:
            saturates.add(n)
            made_of.add(n)
        elif colors[n] in FREE and f.reads and made_of.issuperset(flow.predecessors(n)):
            made_of.add(n)
    readers = (n for n, f in enumerate(facts) if _reads_bounds(f, colors[n], level))
    read = read_by(flow, operands_of(flow, readers), made_of.difference(saturates).__contains__)
    return {n: reader for n, reader in read.items() if n in saturates}


def _reads_bounds(f: NodeFacts, color: Color | None, level: Level) -> bool:
    if f.orders or f.op == "output":
        return level is not Level.MAX
    # Denied arithmetic, as a power's, reads how near the bound is, though its tensors may be low.
    is_denied = f.color is Color.DENY and not f.bounded and level is not Level.MAX
    is_float32 = color in (Color.DENY, None)  # None: on no list, or with a body
    return (is_denied or is_float32) and not f.widens


def read_for_phase(graph: AnalyzedGraph) -> dict[int, int]:
    """Map each value that is read for its phase to the operator that reads it."""
    flow, colors = graph.flow, graph.colors
    readers = (n for n, f in enumerate(graph.facts) if f.reads_phase)
    return read_by(flow, operands_of(flow, readers), lambda n: colors[n] in FREE)


def read_for_position(graph: AnalyzedGraph) -> dict[int, int]:
    """Map each value that says where something is to an operator that looks there.

    Included are values computed from positions and full float32 alone, such as the fraction by
    which neighbours are weighed. If positions are counted from `raw` coordinates, a position that
    the model moved is included as well. The trace ends at `narrowed` operators, which compute in
    float32 inside.
    """
    facts, flow, colors = graph.facts, graph.flow, graph.colors
    pairs = [(p, n) for n in range(len(facts)) for p in _positions(graph, n)]
    if not pairs:
        return {}
    read = read_by(flow, pairs, lambda n: colors[n] in FREE and n not in graph.narrowed)
    of: dict[int, int | None] = {}  # all in full float32: whose position it is, if one's
    counted: set[int] = set()  # of these, from raw coordinates
    for n, f in enumerate(facts):
        operands = [*flow.predecessors(n)]
        reader = next((of[o] for o in operands if of.get(o) is not None), None)
        is_moved = colors[n] is Color.INFER and _adds_to(graph, n, counted)
        if colors[n] is Color.INFER and n in read:
            of[n] = read[n]
        elif colors[n] is Color.DENY or not (f.reads or f.is_parameter):
            of[n] = None
        elif is_moved or (colors[n] in FREE and all(o in of for o in operands)):
            of[n] = reader
        if of.get(n) is not None and any(o in counted or o in graph.raw for o in operands):
            counted.add(n)
    return {n: reader for n, reader in of.items() if reader is not None}


def _positions(graph: AnalyzedGraph, n: int) -> list[int]:
    """Return the operands of an operator that say where it looks."""
    names = graph.facts[n].positions
    return [p for p in graph.flow.predecessors(n) if graph.facts[p].name in names] if names else []


def displaced(graph: AnalyzedGraph) -> frozenset[int]:
    """Return raw coordinates to which the model added something, and what free operators compute of
    them."""
    found: set[int] = set()
    for n, color in enumerate(graph.colors):
        if color not in FREE or n in graph.raw or n in graph.narrowed:
            continue
        if not found.isdisjoint(graph.flow.predecessors(n)) or _adds_to(graph, n, graph.raw):
            found.add(n)
    return frozenset(found)


def read_for_digits(graph: AnalyzedGraph) -> dict[int, int]:
    """Map each value that is returned, or read by float32 arithmetic, to its reader. A value that
    only `narrowed` operators read is left out: scores before a softmax, a stream before norms."""
    facts, colors, narrowed = graph.facts, graph.colors, graph.narrowed
    readers = (n for n, f in enumerate(facts) if _reads_digits(f, colors[n]) and n not in narrowed)
    passes = {n for n, color in enumerate(colors) if color in FREE and n not in narrowed}
    return read_by(graph.flow, operands_of(graph.flow, readers), passes.__contains__)


def asked_for(graph: AnalyzedGraph, colors: Sequence[Color | None]) -> Iterable[int]:
    """Return the `narrowed` nodes that the model's code asks for float32 and whose digits are read
    by more than allowed operators, which would round them. `colors` tell which operators are free.
    """
    asked = [n for n in graph.narrowed if graph.facts[n].asked]
    if not asked:
        return ()
    readers = (n for n, f in enumerate(graph.facts) if _reads_digits(f, colors[n]))
    read = read_by(graph.flow, operands_of(graph.flow, readers), lambda n: colors[n] in FREE)
    return filter(read.__contains__, asked)


def norms_of_streams(graph: AnalyzedGraph) -> frozenset[int]:
    """Return the norms that make a residual stream, as in layers that end in a norm.

    The result of such a norm goes both into a layer and into a sum with the layer's result, or is
    returned by the graph. Rounding it would go through all layers.
    """
    facts, flow = graph.facts, graph.flow
    views = {n for n, f in enumerate(facts) if f.color is Color.CLEAR}

    def makes_stream(n: int) -> bool:
        seen, unseen = set[int](), [*flow[n]]
        while unseen:
            reader = unseen.pop()
            unseen += (m for m in flow[reader] if reader in views and m not in seen)
            seen.add(reader)
        readers = [facts[m].op for m in seen - views]
        return "output" in readers or (len(readers) > 1 and not SUMS.isdisjoint(readers))

    norms = {n for n, f in enumerate(facts) if f.storage is Level.BALANCED and f.bounded}
    return frozenset(n for n in norms if not facts[n].saturates and makes_stream(n))


def begin_streams(graph: AnalyzedGraph) -> dict[int, int]:
    """Map the values that norms of streams are computed from to the norm."""
    facts, flow, colors = graph.facts, graph.flow, graph.colors
    passes = {n for n, f in enumerate(facts) if colors[n] in FREE and f.op not in SUMS}
    return read_by(flow, operands_of(flow, graph.norms_of_streams), passes.__contains__)


def _reads_digits(f: NodeFacts, color: Color | None) -> bool:
    return f.op == "output" or color in (Color.DENY, None)


def _adds_to(graph: AnalyzedGraph, n: int, places: Container[int]) -> bool:
    """Whether a node is a sum of one of `places`, of the same size as the sum, and something
    else."""
    total = graph.facts[n]
    if total.op not in SUMS:
        return False
    of_these = (graph.facts[o] for o in graph.flow.predecessors(n) if o in places)
    return any(f.numel == total.numel for f in of_these)
