"""Plain JSON to frozen dataclasses and back, by their field types, and the schemas of such files;
nothing in a file is run.

    Paint(Color.DENY, "listed", "softmax")  <->  {"color": "deny", "rule": "listed", ...}

Fields at their defaults are left out. Decoding checks every value and names the place of one that
is wrong: `plans[0].paints.linear.color: 'denny' is none of allow, deny, ...`.
"""

from __future__ import annotations

import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

import torch

from amp_graph.dtypes import dtype_name
from amp_graph.errors import PlanError, did_you_mean

T = TypeVar("T")

DTYPES = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}  # as they are
NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def encode(value: Any) -> Any:
    """Return the value as JSON objects, arrays, strings, numbers and nulls."""
    if type(value) in PLAIN:
        return value
    if is_dataclass(value):
        kind: Any = type(value)
        given = ((n, getattr(value, n), default) for n, default in _defaults(kind).items())
        return {n: encode(v) for n, v, default in given if default is MISSING or v != default}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return next(k for k, v in NOT_FINITE.items() if v == value or v != v)
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    return value


def decode(kind: Any, value: Any, where: str) -> Any:
    """A value of type `kind` from JSON. Raises PlanError that names the place."""
    origin = typing.get_origin(kind)
    if is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, where)
    if origin is not None:
        return _decode_container(origin, typing.get_args(kind), value, where)
    if kind is torch.dtype:
        return _one_of(DTYPES, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_one_of({m.value: m.value for m in kind}, value, where))
    if kind is float:
        return _number(value, where)
    return _plain(kind, value, where)


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    table = _plain(dict, value, where)
    known = _types(kind)
    for key in table:
        if key not in known:
            raise PlanError(f"{where}: unknown key {key!r}.{did_you_mean(key, known)}")
    for name, (_, is_required) in known.items():
        if is_required and name not in table:
            raise PlanError(f"{where}: {name!r} is missing")
    return kind(**{k: decode(known[k][0], v, f"{where}.{k}") for k, v in table.items()})


@functools.cache
def _types(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass, and whether it has to be given. Cached, as
    Python evaluates the text of annotations anew each time it is asked."""
    hints = typing.get_type_hints(kind)
    defaults = _defaults(kind)
    return {f.name: (hints[f.name], defaults[f.name] is MISSING) for f in fields(kind) if f.init}


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    plain = [k for k in kinds if k is not type(None)]
    for kind in plain:
        if isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, bool):
            return value
    return decode(plain[-1], value, where)


def _decode_container(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if issubclass(origin, Mapping):
        table = _plain(dict, value, where)
        return {k: decode(kinds[1], v, f"{where}.{k}") for k, v in table.items()}
    items = _plain(list, value, where)
    make: Callable[[Iterable[Any]], Any] = frozenset if origin is frozenset else tuple
    return make(decode(kinds[0], v, f"{where}[{i}]") for i, v in enumerate(items))


def _plain(kind: type[T], value: Any, where: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
        raise PlanError(f"{where}: must be {names.get(kind, kind.__name__)}, not {value!r:.60}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max):
        return float(value)
    return float(_one_of(NOT_FINITE, value, where))


def _one_of(table: Mapping[str, T], value: Any, where: str) -> T:
    if not isinstance(value, str) or value not in table:
        wrong = f"none of {', '.join(table)}" if len(table) < 8 else "not known"
        raise PlanError(f"{where}: {value!r:.60} is {wrong}.{did_you_mean(value, table)}")
    return table[value]


@functools.cache
def _defaults(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass; MISSING where a value has to be given."""
    return {f.name: _default(f) for f in fields(kind)}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


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
    known = _types(kind).items()
    definition |= {
        "properties": {name: describe(type_, definitions) for name, (type_, _) in known},
        "required": [name for name, (_, is_required) in known if is_required],
        "additionalProperties": False,
    }
    return reference
