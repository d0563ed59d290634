"""What Dynamo does otherwise while it captures for us is in force then, and not after."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

from torch._dynamo.variables import TorchInGraphFunctionVariable

from amp_graph.dynamo_changes import in_force

NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def methods() -> list[Any]:
    return [vars(kind).get(name) for kind, name, _ in in_force.CHANGES]


def tables() -> list[dict[Any, Any]]:
    return [dict(table()) for table, _ in in_force.ENTRIES]


def test_what_dynamo_did_before_is_put_back() -> None:
    before = methods(), tables()
    with in_force.changes_in_force(), in_force.changes_in_force():
        assert all(now is not then for now, then in zip(methods(), before[0], strict=True))
        assert all(now != then for now, then in zip(tables(), before[1], strict=True))
    assert (methods(), tables()) == before


def test_a_change_takes_all_that_the_method_takes() -> None:
    """What may be left out also by name, as other versions of Dynamo give what is new in them."""
    for kind, name, change in in_force.CHANGES:
        method = inspect.unwrap(getattr(kind, name))
        takes = [p for p in inspect.signature(method).parameters.values() if p.kind in NAMED]
        required = [p.name for p in takes if p.default is p.empty and p.kind is not NAMED[1]]
        by_name = {p.name: None for p in takes if p.name not in required}
        inspect.signature(change).bind(method, *required, **by_name)


def test_calls_of_functions_are_changed_at_one_place() -> None:
    with in_force.changes_in_force():
        inner: Any = TorchInGraphFunctionVariable.call_function.__wrapped__  # type: ignore[attr-defined]
    assert not hasattr(inner, "__wrapped__")


def test_no_entry_is_changed_by_two_files() -> None:
    """The second would take the place of the first."""
    changed = Counter((id(table()), key) for table, own in in_force.ENTRIES for key in own)
    assert max(changed.values()) == 1
