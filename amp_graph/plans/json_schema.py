"""JSON schemas of dataclasses, made from the same fields that files are read and written by."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch

from amp_graph.plans.plain_json import DTYPES, NOT_FINITE

PLAIN = {str: "string", int: "integer", bool: "boolean", types.NoneType: "null"}


def schema(
    form: str, version: int, content: Mapping[str, Any], definitions: Mapping[str, Any]
) -> dict[str, Any]:
    """The schema (draft 2020-12) of a file that says its format and version, and has `content`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": form,
        "type": "object",
        "properties": {"format": {"const": form}, "schema": {"const": version}, **content},
        "required": ["format", "schema", *content],
        "$defs": dict(sorted(definitions.items())),
    }


def describe(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value of type `kind`; those of dataclasses go into `definitions`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _describe_fields(kind, definitions)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [describe(k, definitions) for k in inner]}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": describe(inner[1], definitions)}
    if origin is not None:
        unique = {"uniqueItems": True} if origin is frozenset else {}
        return {"type": "array", "items": describe(inner[0], definitions), **unique}
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
        "properties": {f.name: describe(hints[f.name], definitions) for f in fields(kind)},
        "required": [
            f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
        ],
        "additionalProperties": False,
    }
    definitions[kind.__name__] = definition
    return reference
