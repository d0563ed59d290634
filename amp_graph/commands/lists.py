"""`lists`: the operator lists, and where an operator stands on them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.table import Table
from rich.text import Text

from amp_graph.commands.command import Command, out
from amp_graph.errors import ListError
from amp_graph.inspection.terminal import columns
from amp_graph.operator_names import full_name, known_names, no_operator
from amp_graph.oplists import OpLists, load_lists


def _lists_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("operator", nargs="*", help="such as aten.gelu; without any, all groups")
    parser.add_argument("--lists", metavar="FILE", help="with operator lists of your own on top")


def _lists(args: Namespace) -> int:
    lists = load_lists() if args.lists is None else load_lists().merged(args.lists)
    if not args.operator:
        out.print(_groups(lists))
        return 0
    known = True
    for name in args.operator:
        known &= _say_where(name, lists)
    return int(not known)


def _groups(lists: OpLists) -> Table:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, listing in lists.entries.items():
        key = listing.color.value, listing.group, listing.why
        groups.setdefault(key, []).append(name.removeprefix("aten."))
    found = columns("list", "group", "why", "operators", gap=1)
    for (color, group, why), names in groups.items():
        found.add_row(color, Text(group), Text(why), Text(", ".join(names)))
    return found


def _say_where(name: str, lists: OpLists) -> bool:
    """Print where an operator stands; whether it is on a list."""
    known = known_names() | lists.entries.keys()
    full = full_name(name, known)
    if full is None:
        raise ListError(no_operator(name, known))
    found = lists.entries_for(full)
    for entry, listing in found.items():
        named = entry if _packet(entry) == _packet(full) else f"{full} follows {entry}"
        place = f"group '{listing.group}' ({listing.file})"
        out.print(Text(f"{named}: {listing.color.value}, {place}: {listing.why}"), soft_wrap=True)
    if not found:
        out.print(Text(f"{full} is on no list, so it stays in float32."), soft_wrap=True)
    return bool(found)


def _packet(name: str) -> str:
    """`aten.softmax` of `aten.softmax.int`."""
    return ".".join(name.split(".")[:2])


LISTS = Command(
    "lists",
    "show the operator lists, or which list an operator is on and why",
    "Exits with 1 if an operator is on no list.",
    _lists_arguments,
    _lists,
)
