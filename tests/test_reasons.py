"""A rule goes by one name, whoever speaks of it: what paints, spreads, tells and suggests."""

from __future__ import annotations

import ast
from pathlib import Path

import amp_graph
from amp_graph.ir import Color, Paint
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
