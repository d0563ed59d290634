"""The operator lists: load the shipped TOML files, check them, merge the user's own.

A list file holds groups, each with a reason:

    [reductions]                          # in deny.toml; a user's file says [deny.reductions]
    why = "A sum of many terms loses the small ones."
    ops = ["aten.sum", "aten.var.correction"]

An entry names an operator with all its overloads, or one overload, which then wins. An
in-place operator takes the entry of its functional form unless it has one of its own.

Private name of PyTorch used here:

    torch._C._jit_get_schemas_for_operator    the arguments of an operator
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from amp_graph.dtypes import LOW_DTYPES
from amp_graph.errors import ListError, did_you_mean
from amp_graph.files import as_path
from amp_graph.ir import COLORS, Color
from amp_graph.listing import Listing, check_group
from amp_graph.operator_names import (
    Names,
    dotted,
    full_name,
    known_names,
    no_operator,
    spellings,
)

UserList: TypeAlias = str | Path | Mapping[str, Any]
"""A TOML file, or a mapping such as `{"deny": ["aten.gelu"]}`."""
UserLists: TypeAlias = UserList | Sequence[UserList]
Kernels: TypeAlias = dict[tuple[str, torch.dtype], Names]

SCHEMA = 1


@dataclass(frozen=True)
class OpLists:
    """Every listing by operator name ("aten.add", "aten.pow.Scalar"), and the missing kernels."""

    entries: Mapping[str, Listing]
    no_kernel: Mapping[tuple[str, torch.dtype], frozenset[str]]
    _found: dict[Any, Listing | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def lookup(self, op: Any) -> Listing | None:
        """Return the listing of an `OpOverload` or `HigherOrderOperator`; None if it is on no
        list."""
        if op not in self._found:
            found = (self.entries[n] for n in spellings(str(op)) if n in self.entries)
            self._found[op] = next(found, None)
        return self._found[op]

    def entries_for(self, name: str) -> dict[str, Listing]:
        """Return the entries that decide about an operator, or one overload, named as entries
        are."""
        is_overload = name.count(".") > 1
        found: dict[str, Listing] = {}
        for form in spellings(name if is_overload else f"{name}."):
            if form in self.entries:
                return found | {form: self.entries[form]}
            if form.endswith("."):  # all overloads
                found |= {n: e for n, e in self.entries.items() if n.startswith(form)}
        return found

    def has_kernel(self, op: Any, device_type: str, dtype: torch.dtype) -> bool:
        """Return False if `op`, an overload or its name, is known to fail in `dtype` on such a
        device, forward or backward."""
        missing = self.no_kernel.get((device_type, dtype))
        return not missing or missing.isdisjoint(spellings(str(op)))

    def merged(self, user: UserLists) -> OpLists:
        """Return these lists with the user's on top: a user's entry hides every shipped one it
        covers.

        Facts that a shipped listing has about an operator still hold after a user moved the
        operator to another list (`Listing.knowing`).

        Raises ListError when the user's lists are malformed, contradict one another, or name an
        operator that the installed torch does not have.
        """
        mine = _read_user(user)
        kept = {n: listing for n, listing in self.entries.items() if not _covered(n, mine)}
        for name, listing in mine.items():
            kept[name] = listing
            for form, shipped in self.entries_for(name).items():
                is_of_overload = form.count(".") > name.count(".")
                own = f"{name}.{form.rpartition('.')[2]}" if is_of_overload else name
                if own == name or own not in mine:
                    kept[own] = listing.knowing(shipped)
        return OpLists(kept, self.no_kernel)

    def without(self, color: str, op: str) -> OpLists:
        """Return these lists with an operator taken off one. Raises ListError if it is not on
        it."""
        name = full_name(op, self.entries) or op
        listing = self.entries.get(name)
        if listing is None or listing.color.value != color:
            found = self.entries_for(full_name(op, known_names()) or op).items()
            on = ", ".join(f"{entry!r} is on the {e.color.value} list" for entry, e in found)
            raise ListError(
                f"{op!r} cannot be taken off the {color} list: {on or 'it is on no list'}"
            )
        return replace(self, entries={n: e for n, e in self.entries.items() if n != name})


@functools.cache
def load_lists(folder: Path | None = None, strict: bool = False) -> OpLists:
    """Load the shipped lists, or those of another folder with the same five files.

    Operators of other torch releases are dropped silently; `strict` raises ListError.
    """
    place = folder or _shipped_folder()
    known = known_names()
    entries: dict[str, Listing] = {}
    for color in COLORS:
        table = _parse(place / f"{color}.toml")
        _add_groups(entries, table, COLORS[color], f"{color}.toml", known, strict)
    kernels = _read_kernels(_parse(place / "kernels.toml"), known, strict)
    return OpLists(entries, kernels)


def _shipped_folder() -> Traversable:
    """Return the folder of the shipped lists: beside the package in a checkout, editable install or
    not; package data in a wheel."""
    sibling = Path(__file__).resolve().parent.parent / "allow_deny_lists"
    return sibling if sibling.is_dir() else importlib.resources.files("amp_graph.allow_deny_lists")


def _parse(path: Traversable) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ListError(
            f"{path}: not UTF-8, as TOML has to be: {error.reason} in line {line}. Save it as "
            "UTF-8."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ListError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ListError(
            f"{path}: cannot be read: {error.strerror}. Give the path of a TOML file."
        ) from None
    if table.pop("schema", SCHEMA) != SCHEMA:
        raise ListError(f"{path}: this version reads `schema = {SCHEMA}` only.")
    return table


def _add_groups(
    entries: dict[str, Listing], groups: Any, color: Color, file: str, known: Names, strict: bool
) -> None:
    """Check the groups of one colour and add their operators to `entries`."""
    if not isinstance(groups, Mapping):
        raise ListError(
            f"{file}: {color.value!r} must hold groups, or a list of operators, not {groups!r}."
        )
    for group, table in groups.items():
        where = f"{file}, group {group!r}"
        listing = check_group(table, color, group, file, where)
        names = [*_resolve(table["ops"], where, known, strict, table.get("optional", False))]
        if strict:
            _check_arguments(listing, names, where)
        for name in names:
            if name in entries:
                raise ListError(_twice(name, entries[name], where, color))
            entries[name] = listing


def _resolve(
    names: Sequence[str], where: str, known: Names, strict: bool, optional: bool
) -> Iterator[str]:
    """Return the full names of the operators that exist, or may exist once their library is
    imported."""
    namespaces = {name.partition(".")[0] for name in known}
    for name in names:
        full = full_name(name, known)
        if full is not None:
            yield full
        elif optional and dotted(name).partition(".")[0] not in namespaces:
            yield dotted(name)
        elif strict and not optional:
            raise ListError(
                f"{where}: {no_operator(name, known)} An operator of another library needs that "
                "library imported, or `optional = true`."
            )


def _check_arguments(listing: Listing, names: Sequence[str], where: str) -> None:
    """Raise ListError if the group speaks of an argument that none of its operators has."""
    spoken_of = listing.arguments()
    if not spoken_of:
        return
    there = {argument for name in names for argument in _arguments_of(name)}
    for argument in spoken_of:
        if there and argument not in there:
            hint = did_you_mean(argument, there)
            raise ListError(f"{where}: none of its operators has an argument {argument!r}.{hint}")


def _arguments_of(name: str) -> Iterator[str]:
    """Return the arguments of all overloads of an operator; none for a higher-order operator."""
    namespace, packet, *_ = name.split(".")
    if namespace != "higher_order":
        for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}"):
            yield from (argument.name for argument in schema.arguments)


def _twice(name: str, first: Listing, where: str, color: Color) -> str:
    place = f"{first.file}, group {first.group!r}"
    if first.color is color:
        return f"{where}: {name!r} is in {place} already; remove one of the two."
    lists = f"the {first.color.value} list ({place}) and the {color.value} list"
    return f"{where}: {name!r} is on {lists}; keep it on one."


def _read_kernels(table: Mapping[str, Any], known: Names, strict: bool) -> Kernels:
    """Read {("cpu", torch.float16): names} from tables named [cpu.float16]."""
    missing: Kernels = {}
    for device, by_dtype in table.items():
        for dtype, group in by_dtype.items():
            where = f"kernels.toml, table [{device}.{dtype}]"
            if dtype not in LOW_DTYPES:
                raise ListError(f"{where}: the precision must be one of {sorted(LOW_DTYPES)}.")
            check_group(group, Color.KEEP, dtype, "kernels.toml", where)
            names = _resolve(group["ops"], where, known, strict, group.get("optional", False))
            missing[device, LOW_DTYPES[dtype]] = frozenset(names)
    return missing


def _read_user(user: UserLists) -> dict[str, Listing]:
    sources = (user,) if isinstance(user, (str, Path, Mapping)) else user
    known = known_names()
    entries: dict[str, Listing] = {}
    for source in sources:
        file = "the lists given" if isinstance(source, Mapping) else str(source)
        table = source if isinstance(source, Mapping) else _parse(as_path(source, ListError))
        for color, groups in table.items():
            if color not in COLORS:
                hint = did_you_mean(color, COLORS)
                raise ListError(f"{file}: {color!r} is none of {', '.join(COLORS)}.{hint}")
            if isinstance(groups, (list, tuple, set, frozenset)):
                why = "Listed by the user."
                groups = {"user": {"why": why, "ops": list(groups)}} if groups else {}
            _add_groups(entries, groups, COLORS[color], file, known, strict=True)
    return entries


def _covered(name: str, mine: Mapping[str, Listing]) -> bool:
    """Whether a user's entry speaks for the shipped entry `name`, an overload or in-place form."""
    overload = name if name.count(".") > 1 else f"{name}."
    return any(n.rstrip(".") in mine for n in spellings(overload))
