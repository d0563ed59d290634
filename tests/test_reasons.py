"""A rule goes by one name, whoever speaks of it: what paints, spreads, tells and suggests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from amp_graph.inspection.suggestions import TELL
from amp_graph.passes import paint
from amp_graph.reasons import WORDS

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
