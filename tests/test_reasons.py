"""A rule goes by one name, whoever speaks of it: what paints, spreads, tells and suggests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from amp_graph.inspection.suggestions import TELL
from amp_graph.ir import Color, NodeFacts, Paint, Plan
from amp_graph.passes import paint
from amp_graph.reasons import WORDS, Chains

TOLD_BY_THE_LIST = {"listed", "free", "float32 math inside"}


def rules_in(file: Path) -> Iterator[str]:
    """What is written as the rule of a Paint."""
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Paint" and len(call.args) > 1:
            constants = (n.value for n in ast.walk(call.args[1]) if isinstance(n, ast.Constant))
            yield from (value for value in constants if isinstance(value, str))


PAINTED = {rule for file in Path(paint.__file__).parent.glob("*.py") for rule in rules_in(file)}


def test_every_rule_has_words() -> None:
    assert {*WORDS} == PAINTED - TOLD_BY_THE_LIST


def test_what_spreads_and_what_is_suggested_goes_by_rules_that_paint() -> None:
    assert {*paint.SPREAD, *TELL} <= PAINTED


def chains(**because: str) -> Chains:
    """Those of nodes that follow one another."""
    paints = {name: Paint(Color.DENY, "promoted by", other) for name, other in because.items()}
    facts = {name: NodeFacts(name, "aten.add.Tensor") for name in because}
    return Chains(Plan(torch.bfloat16, facts, paints), {}, {})


def test_reasons_are_written_once_for_all_nodes_that_have_them() -> None:
    """In a stream, which may be as long as the model is deep, every node has those before it."""
    found = chains(a="", b="a", c="b")
    last, before, *_ = found.of("c")
    assert [last.node, before.node] == ["c", "b"]
    assert before is found.of("b")[0]
    assert [r.node for r in found.of("c")] == ["c", "b", "a"]


def test_reasons_that_go_in_a_circle_end_where_it_closes() -> None:
    found = chains(a="b", b="a", c="a")
    order = {name: [r.node for r in found.of(name)] for name in "cab"}
    assert order == {"c": ["c", "a", "b"], "a": ["a", "b"], "b": ["b", "a"]}
