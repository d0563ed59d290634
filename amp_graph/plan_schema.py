"""The JSON schema of a plan file, made from the same fields that plans are read by."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch

from amp_graph.ir import Plan
from amp_graph.plain_json import DTYPES, NOT_FINITE
from amp_graph.plan_file import FORMAT, SCHEMA

PLAIN = {str: "string", int: "integer", bool: "boolean", types.NoneType: "null"}


def schema() -> dict[str, Any]:
    """The schema as a JSON object (draft 2020-12)."""
    definitions: dict[str, Any] = {}
    plan = _describe(Plan, definitions)
    mark = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    definitions["Plan"]["properties"] = {
        "fingerprint": mark,
        **definitions["Plan"]["properties"],
    }
    definitions["Plan"]["required"].insert(0, "fingerprint")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        "type": "object",
        "properties": {
            "format": {"const": FORMAT},
            "schema": {"const": SCHEMA},
            "torch": {"type": "string"},
            "plans": {"type": "array", "minItems": 1, "items": plan},
        },
        "required": ["format", "schema", "plans"],
        "$defs": dict(sorted(definitions.items())),
    }


def _describe(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _describe_fields(kind, definitions)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_describe(k, definitions) for k in inner]}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _describe(inner[1], definitions)}
    if origin is not None:
        unique = {"uniqueItems": True} if origin is frozenset else {}
        return {"type": "array", "items": _describe(inner[0], definitions), **unique}
    if kind is torch.dtype:
        return {"enum": sorted(DTYPES)}
    if issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": sorted(NOT_FINITE)}]}
    return {"type": PLAIN[kind]}


def _describe_fields(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": f"#/$defs/{kind.__name__}"}
    if kind.__name__ in definitions:
        return reference
    definition = definitions[kind.__name__] = {"type": "object"}
    hints = typing.get_type_hints(kind)
    definition |= {
        "properties": {f.name: _describe(hints[f.name], definitions) for f in fields(kind)},
        "required": [
            f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
        ],
        "additionalProperties": False,
    }
    definitions[kind.__name__] = definition
    return reference
