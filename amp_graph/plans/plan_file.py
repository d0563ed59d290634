"""A plan as a file: precision decisions that a team can review, compare, edit and pin.

    {"format": "amp_graph plan", "schema": 1, "torch": "2.13.0",
     "plans": [{"fingerprint": "5f0c...", "dtype": "bfloat16",
                "facts": {"linear": {...}},
                "paints": {"linear": {"color": "allow", "rule": "listed", "because": "matmul"}},
                "low": ["linear"], "casts": [...]}]}

A file holds the plans of all graphs of a model, in the order in which they were captured. To
change a decision, edit a node's `color` under `paints`; `low` and `casts` follow from the colours
and are worked out again. `docs/plan.schema.json` is the schema.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from amp_graph.dtypes import LOW_DTYPES, dtype_name
from amp_graph.errors import PlanError
from amp_graph.files import as_path, write_whole
from amp_graph.ir import Plan
from amp_graph.plans.matching import fingerprint
from amp_graph.plans.pins import Saved
from amp_graph.plans.plain_json import decode, describe, encode, schema

FORMAT = "amp_graph plan"
SCHEMA = 1
LINES_TO_DEPTH = 4  # one line for each node and cast of a plan

PlanSource: TypeAlias = str | Path | Plan | Sequence[Plan]
"""A file, one plan, or the plans of all graphs of a model."""


def save_plan(plan: Plan | Sequence[Plan], path: str | Path) -> None:
    """Write one plan, or all plans of a model (`save_plan(plans(model), path)`), as JSON.

    The file is complete or stays as it was: it is written beside `path` and then moved. Raises
    PlanError if it cannot be.
    """
    table = {
        "format": FORMAT,
        "schema": SCHEMA,
        "torch": str(torch.__version__),
        "plans": [encode_plan(p) for p in as_plans(plan).plans],
    }
    write_whole(path, _lines(table) + "\n", PlanError)


def load_plan(path: str | Path) -> tuple[Plan, ...]:
    """Load the plans in a file, in order of capture.

    Raises PlanError, naming the file and the place in it, for a file that is missing, cut off, of
    another format or of a newer schema, that has a value which is not possible, or in which the
    description of the graph was edited.
    """
    return _saved(path).plans


def _saved(path: str | Path) -> Saved:
    try:
        text = as_path(path, PlanError).read_text(encoding="utf-8")
        table = json.loads(text, object_pairs_hook=partial(_each_once, path))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise PlanError(f"{path}: not a plan, or cut off: {error}") from None
    except RecursionError:
        raise PlanError(f"{path}: not a plan: nested too deeply") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise PlanError(f'{path}: not a plan: it does not say "format": "{FORMAT}"')
    if table.get("schema") != SCHEMA:
        raise PlanError(
            f"{path}: has schema {table.get('schema')!r}; this version reads schema {SCHEMA}. "
            "Use the version of amp_graph that wrote it, or save the plan again."
        )
    plans = table.get("plans")
    if not isinstance(plans, list) or not plans:
        raise PlanError(f"{path}: 'plans' must be an array with at least one plan")
    version = table.get("torch", "")
    if not isinstance(version, str):
        raise PlanError(f"{path}: 'torch' must be the version that it was saved under, as a string")
    decoded = tuple(_decode_plan(p, f"{path}: plans[{i}]") for i, p in enumerate(plans))
    return Saved(decoded, str(path), version)


def _each_once(path: str | Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises PlanError for a key that it has twice, one of which would be
    lost."""
    table = dict(pairs)
    if len(table) < len(pairs):
        (key, _), *_ = (Counter(key for key, _ in pairs)).most_common(1)
        raise PlanError(f"{path}: {key!r} is there twice in one object; remove one of the two")
    return table


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema of a plan file, as in `docs/plan.schema.json`."""
    definitions: dict[str, Any] = {}
    plans = {"type": "array", "minItems": 1, "items": describe(Plan, definitions)}
    mark = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    plan = definitions["Plan"]
    plan["properties"] = {"fingerprint": mark, **plan["properties"]}
    plan["required"] = ["fingerprint", *plan["required"]]
    return schema(FORMAT, SCHEMA, {"torch": {"type": "string"}, "plans": plans}, definitions)


def as_plans(plan: PlanSource) -> Saved:
    """Read the `plan` argument of `convert`. Raises PlanError."""
    if isinstance(plan, (str, Path)):
        return _saved(plan)
    plans = (plan,) if isinstance(plan, Plan) else plan
    is_several = isinstance(plans, Sequence) and all(isinstance(p, Plan) for p in plans)
    if not is_several:
        raise PlanError(f"a plan is a file, a Plan or several Plans, not {type(plan).__name__}")
    if not plans:
        raise PlanError("there is no plan: a model has plans once it was called")
    return Saved(tuple(plans))


def encode_plan(plan: Plan) -> dict[str, Any]:
    bodies = {name: encode_plan(body) for name, body in plan.bodies.items()}
    table = {"fingerprint": fingerprint(plan), **encode(plan)}
    return table | ({"bodies": bodies} if bodies else {})


def _decode_plan(table: Any, where: str) -> Plan:
    claims = _fingerprints(table)
    plan: Plan = decode(Plan, _without_fingerprints(table), where)
    if _fingerprints(encode_plan(plan)) != claims:
        raise PlanError(
            f"{where}.fingerprint: 'facts' do not describe the graph that the plan was made for. "
            "They are not for editing; change a node's 'color' under 'paints' instead."
        )
    _check(plan, where)
    return plan


def _check(plan: Plan, where: str) -> None:
    if plan.dtype not in LOW_DTYPES.values():
        legal, given = " or ".join(LOW_DTYPES), dtype_name(plan.dtype)
        raise PlanError(f"{where}.dtype: must be {legal}, not {given!r}")
    for name in plan.paints:
        if name not in plan.facts:
            raise PlanError(f"{where}.paints: the graph has no node {name!r}")
    for name, body in plan.bodies.items():
        _check(body, f"{where}.bodies.{name}")


def _fingerprints(table: Any) -> Any:
    if not isinstance(table, Mapping):
        return None
    bodies = table.get("bodies")
    inner = bodies.items() if isinstance(bodies, Mapping) else ()
    return table.get("fingerprint"), {name: _fingerprints(b) for name, b in inner}


def _without_fingerprints(table: Any) -> Any:
    if not isinstance(table, Mapping):
        return table
    rest = {k: v for k, v in table.items() if k != "fingerprint"}
    if isinstance(rest.get("bodies"), Mapping):
        rest["bodies"] = {n: _without_fingerprints(b) for n, b in rest["bodies"].items()}
    return rest


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one line per node, so that a change of one decision is a change of one
    line."""
    if depth >= LINES_TO_DEPTH or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, allow_nan=False)
    indent = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in value.items()]
        opening, closing = "{}"
    else:
        items = [_lines(v, depth + 1) for v in value]
        opening, closing = "[]"
    between = f",\n{indent}"
    return f"{opening}\n{indent}{between.join(items)}\n{' ' * depth}{closing}"
