"""The bytes that place_casts moves are the fewest possible, on random small flow graphs.

The cost is written down here a second time, from the definition rather than as a cut, and
minimised by trying every assignment of the free nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_graph.flow import flow_graph
from amp_graph.ir import FREE, Color, NodeFacts, Paint, TensorFacts
from amp_graph.passes.place_casts import needs_cast, place_casts

SETTINGS = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@dataclass(frozen=True)
class Problem:
    facts: Mapping[str, NodeFacts]
    paints: Mapping[str, Paint]

    def solve(self):
        return place_casts(self.facts, flow_graph(self.facts), self.paints)

    def readers(self, value: str) -> list[str]:
        return [f.name for f in self.facts.values() if value in f.reads]

    def needs_cast(self, value: str, reader: str, is_low: bool) -> bool:
        """Not to take a part out of a tuple, nor for a reduction that returns float32 of low
        values, nor where operands of two dtypes may meet: a 0-dimensional one beside a larger one,
        or a low one beside one that is surely float32. In float32 nothing wide may come rounded."""
        f = self.facts[reader]
        if f.op != "getitem" and f.widens:
            return is_low or self.paints[value].wide or self.paints[reader].color is Color.KEEP
        if f.op == "getitem" or not f.promotes:
            return f.op != "getitem"
        larger = [r for r in f.reads if r != value and self.facts[r].tensors[0].shape]
        if self.facts[value].tensors[0].shape == ():
            return not larger or (not is_low and self.paints[value].wide)
        others = [self.paints[r] for r in larger]
        beside_float32 = any(p.color in (Color.DENY, Color.KEEP) or p.wide for p in others)
        in_float32 = self.paints[reader].color is Color.DENY
        return not (in_float32 and beside_float32 and not self.paints[value].wide)

    def crossings(self, low: frozenset[str]) -> dict[str, tuple[str, ...]]:
        """Every value that is read on the other side, and who reads it there."""
        found = {}
        for value in self.facts:
            across = [r for r in self.readers(value) if (r in low) != (value in low)]
            if readers := tuple(r for r in across if self.needs_cast(value, r, r in low)):
                found[value] = readers
        return found

    def cost(self, low: frozenset[str]) -> int | None:
        """Bytes moved, and one for each cast that stays in the graph, unlike one of a weight; None
        where a value would be rounded that is read in float32."""
        crossings = self.crossings(low)
        free = [n for n, p in self.paints.items() if p.color in FREE]
        if any(n in low and self.paints[n].wide and n in crossings for n in free):
            return None
        values = [self.facts[value] for value in crossings]
        casts = sum(
            f.numel * (4 + 2) + (0 if f.is_parameter and not f.written else 1) for f in values
        )
        extra = 0
        for f in (self.facts[n] for n in free if n not in low):
            if not f.is_view and f.op != "getitem":
                extra += (4 - 2) * (f.numel + sum(self.facts[r].numel for r in f.reads))
        return casts + extra

    def groups(self) -> list[set[str]]:
        """Free nodes that go together: a tuple and its parts, and all of one written memory."""
        groups = [{n} for n, p in self.paints.items() if p.color in FREE]
        for f in self.facts.values():
            partner = f.reads[0] if f.op == "getitem" else f.memory if f.written else f.name
            if f.name != partner and self.paints[f.name].color in FREE:
                together = [g for g in groups if f.name in g or partner in g]
                groups = [g for g in groups if g not in together]
                groups.append(set().union(*together))
        return groups

    def assignments(self) -> Iterator[frozenset[str]]:
        allowed = frozenset(n for n, p in self.paints.items() if p.color is Color.ALLOW)
        groups = self.groups()
        for choice in itertools.product((False, True), repeat=len(groups)):
            yield allowed.union(*(g for g, low in zip(groups, choice, strict=True) if low))

    def greedy(self) -> frozenset[str]:
        """TensorFlow's fill: free nodes that lie between two allow nodes turn low, then clear
        nodes next to one, until nothing changes."""
        low = {n for n, p in self.paints.items() if p.color is Color.ALLOW}
        above, below = set(low), set(low)
        for f in self.facts.values():
            if self.paints[f.name].color in FREE and any(r in above for r in f.reads):
                above.add(f.name)
        for f in reversed(self.facts.values()):
            if self.paints[f.name].color in FREE and any(r in below for r in self.readers(f.name)):
                below.add(f.name)
        low |= above & below
        clear = [n for n, p in self.paints.items() if p.color is Color.CLEAR]
        while grown := {
            n
            for n in clear
            if n not in low and low.intersection((*self.facts[n].reads, *self.readers(n)))
        }:
            low |= grown
        return frozenset(low)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64])
COLORS = st.sampled_from([Color.ALLOW, Color.DENY, *FREE, *FREE, *FREE])
KINDS = st.sampled_from(["operator"] * 5 + ["tuple", "part", "part", "view", "write"])


class Builder:
    """Adds random nodes to a flow graph, as paint could have left them."""

    def __init__(self, draw: st.DrawFn, plain: bool):
        self.draw, self.plain = draw, plain
        self.facts: dict[str, NodeFacts] = {}
        self.paints: dict[str, Paint] = {}

    def add(self, color: Color, **given) -> None:
        name = f"{color.value}{len(self.facts)}"
        shape, numel = given.pop("size", None) or self.size()
        tensors = (TensorFacts(torch.float32, shape, "cpu", numel),)
        given = {"op": "operator", "memory": name, "color": color, **given}
        self.facts[name] = NodeFacts(name, tensors=tensors, **given)
        wide = not self.plain and color in FREE and self.draw(st.integers(0, 3)) == 0
        self.paints[name] = Paint(color, "drawn", wide=wide)

    def size(self) -> tuple[tuple[int, ...], int]:
        numel = self.draw(SIZES)
        return (() if numel == 1 and self.draw(st.booleans()) else (numel,)), numel

    def values(self) -> list[str]:
        return [n for n, f in self.facts.items() if f.op != "tuple"]

    def operator(self, color: Color, op: str = "operator") -> None:
        reads = st.lists(st.sampled_from(self.values()), min_size=1, max_size=3, unique=True)
        kind = self.draw(st.sampled_from(["plain", "promotes", "widens"]))
        flags = {} if kind == "plain" else {kind: True}
        self.add(color, op=op, reads=tuple(self.draw(reads)), **flags)

    def tuple(self, color: Color) -> None:
        self.operator(color, op="tuple")

    def part(self, color: Color) -> None:
        tuples = [n for n, f in self.facts.items() if f.op == "tuple"]
        if not tuples:
            return self.tuple(color)
        parent = self.draw(st.sampled_from(tuples))
        return self.add(self.paints[parent].color, op="getitem", reads=(parent,))

    def view(self, color: Color) -> None:
        """A view of written memory is as free as what it views, or paint would have said so."""
        base = self.facts[self.draw(st.sampled_from(self.values()))]
        if color in FREE:
            size = (base.tensors[0].shape, base.numel)
            more = {"memory": base.memory, "written": base.written}
            self.add(color, reads=(base.name,), size=size, **more)

    def write(self, color: Color) -> None:
        base = self.facts[self.draw(st.sampled_from(self.values()))]
        members = [n for n, f in self.facts.items() if f.memory == base.memory]
        if color not in FREE or any(self.paints[n].color not in FREE for n in members):
            return
        for name in members:
            self.facts[name] = replace(self.facts[name], written=True)
        reads = dict.fromkeys([base.name, self.draw(st.sampled_from(self.values()))])
        size = (base.tensors[0].shape, base.numel)
        self.add(color, reads=tuple(reads), size=size, memory=base.memory, written=True)


@st.composite
def problems(draw, max_nodes: int = 9, plain: bool = False) -> Problem:
    """Inputs, parameters, operators, tuples with their parts, views, pieces of written memory.

    `plain` graphs have operators only, and every value may be rounded.
    """
    builder = Builder(draw, plain)
    for _ in range(draw(st.integers(1, 2))):
        builder.add(Color.KEEP, op="placeholder", is_parameter=draw(st.booleans()))
    for _ in range(draw(st.integers(2, max_nodes - 2))):
        kind = "operator" if plain else draw(KINDS)
        getattr(builder, kind)(draw(COLORS))
    builder.add(Color.KEEP, op="output", reads=tuple(builder.values()[-1:]))
    return Problem(builder.facts, builder.paints)


def optimal(problem: Problem) -> tuple[int, frozenset[str]]:
    """The lowest cost, and the nodes that are low in every assignment that has no more."""
    costs = {low: problem.cost(low) for low in problem.assignments()}
    fewest = min(c for c in costs.values() if c is not None)
    best = [low for low, c in costs.items() if c == fewest]
    return fewest, frozenset.intersection(*best)


@settings(max_examples=5000, **SETTINGS)
@given(problems())
def test_bytes_and_casts_are_the_fewest_possible_and_ties_go_to_float32(problem):
    low = problem.solve()
    fewest, smallest = optimal(problem)
    assert problem.cost(low) == fewest
    assert low == smallest


@settings(max_examples=500, **SETTINGS)
@given(problems(max_nodes=30))
def test_who_has_a_value_cast(problem):
    facts, paints = [*problem.facts.values()], [*problem.paints.values()]
    flow = flow_graph(problem.facts)
    for value, reader in flow.edges:
        names = facts[value].name, facts[reader].name
        for is_low in (False, True):
            found = needs_cast(facts, flow, paints, value, reader, is_low)
            assert found == problem.needs_cast(*names, is_low)


@settings(max_examples=500, **SETTINGS)
@given(problems(max_nodes=30, plain=True))
def test_a_greedy_fill_never_moves_fewer_bytes(problem):
    low = problem.solve()
    assert problem.cost(low) <= problem.cost(problem.greedy())


def chain(*colors: Color, numel: int = 8) -> Problem:
    facts, paints = {}, {}
    for i, color in enumerate(colors):
        reads = (list(facts)[-1],) if facts else ()
        name = f"{color.value}{i}"
        tensors = (TensorFacts(torch.float32, (numel,), "cpu", numel),)
        facts[name] = NodeFacts(
            name, "operator", color=color, reads=reads, tensors=tensors, memory=name
        )
        paints[name] = Paint(color, "given")
    return Problem(facts, paints)


def test_the_greedy_fill_leaves_behind_what_trails():
    problem = chain(Color.KEEP, Color.ALLOW, Color.INFER, Color.CLEAR, Color.KEEP)
    low = problem.solve()
    assert sorted(low) == ["allow1", "clear3", "infer2"]
    assert problem.cost(low) < problem.cost(problem.greedy())


def test_a_free_stretch_between_float32_nodes_stays_there():
    assert not chain(Color.KEEP, Color.CLEAR, Color.INFER, Color.DENY).solve()


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_parameter_is_cast_in_front_of_its_views_and_an_input_behind_them(is_parameter: bool):
    """Both move as many bytes, but the cast of a parameter is lifted out of the graph."""
    facts = dict(chain(Color.KEEP, Color.CLEAR, Color.ALLOW).facts)
    facts["keep0"] = replace(facts["keep0"], is_parameter=is_parameter)
    facts["clear1"] = replace(facts["clear1"], memory="keep0")
    problem = Problem(facts, {name: Paint(f.color, "given") for name, f in facts.items()})
    assert sorted(problem.solve()) == (["allow2", "clear1"] if is_parameter else ["allow2"])
