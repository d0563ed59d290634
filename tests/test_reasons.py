"""A rule goes by one name, whoever speaks of it: what paints, spreads, tells and suggests."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import amp_graph
from amp_graph.ir import Color, NodeFacts, Paint, Plan
from amp_graph.reasons import Chains
from amp_graph.rules import WORDS, Rule

FILES = [*Path(amp_graph.__file__).parent.rglob("*.py")]


def test_every_rule_is_used() -> None:
    nodes = (node for file in FILES for node in ast.walk(ast.parse(file.read_text())))
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    assert {f"Rule.{rule.name}" for rule in Rule} <= used


def test_no_rule_is_spelled_where_it_is_used() -> None:
    """Of a misspelled member mypy tells."""
    places: list[ast.AST] = []
    for node in (node for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Paint":
            places += node.args[1:2]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".rule"):
            places.append(node)
    assert places
    assert not [n for place in places for n in ast.walk(place) if isinstance(n, ast.Constant)]


def test_rules_are_plain_text_in_files_and_in_print() -> None:
    paint, same = Paint(Color.DENY, Rule.UNLISTED), Paint(Color.DENY, "on no list")
    assert paint == same and repr(paint) == repr(same) and WORDS["on no list"] == WORDS[paint.rule]


def chains(**because: str) -> Chains:
    """Those of nodes that follow one another."""
    paints = {name: Paint(Color.DENY, Rule.PROMOTED, other) for name, other in because.items()}
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
