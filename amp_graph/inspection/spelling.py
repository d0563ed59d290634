"""How values, operators and sizes are spelled, the same in every view."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from amp_graph.ir import NodeFacts, TensorFacts

UNITS = ("KiB", "MiB", "GiB", "TiB")


def input_kind(facts: NodeFacts) -> str:
    if facts.is_parameter:
        return "parameter"
    return "buffer" if facts.is_buffer else "input"


def module_of(facts: NodeFacts) -> str:
    """The path of the module that a node is in: an input is in none, though one reads it first."""
    is_input = facts.op == "placeholder" and input_kind(facts) == "input"
    return "" if is_input else facts.module_path


def graph_title(name: str) -> str:
    """`graph 0, wrap_body_0` of `graph0.wrap_body_0`, by which it goes in the names of files."""
    return re.sub(r"^graph(?=\d)", "graph ", name).replace(".", ", ")


def short_op(op: str) -> str:
    return op.removesuffix(".default")


def line_of(source: str) -> str:
    """`net.py:12` of `net.py:12 in forward`."""
    return source.partition(" ")[0]


def shapes(tensors: tuple[TensorFacts, ...]) -> str:
    """The shape of the first result, and how many more there are."""
    spelled = [f"({', '.join(map(str, tensor.shape))})" for tensor in tensors]
    more = f" and {len(spelled) - 1} more" if len(spelled) > 1 else ""
    return spelled[0] + more if spelled else ""


def plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def count(number: int, noun: str) -> str:
    return f"{number:,} {plural(number, noun)}"


def byte_count(number: int) -> str:
    if number < 1024:
        return f"{number} B"
    size, power = number / 1024, 0
    while round(size, 1) >= 1024 and power < len(UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.1f} {UNITS[power]}"


def flop_count(number: int) -> str:
    """A dash for none: kernels that have no formula are not counted."""
    if not number:
        return "–"
    size, units = float(number), ["", "k", "M", "G", "T", "P"]
    while float(f"{size:.3g}") >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}FLOP"


def percent(part: float, whole: float) -> str:
    """A share, of which 0% is nothing and 100% all; a dash where there is nothing to share."""
    if not whole:
        return "–"
    share = 100 * part / whole
    if 0 < share < 0.05:
        return "<0.1%"
    if 99.95 <= share < 100:
        return ">99.9%"
    return f"{share:.0f}%" if share in (0, 100) or 1 <= share < 99.5 else f"{share:.1f}%"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table as plain text, underlined headings first; none without rows."""
    if not rows:
        return
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(_cells, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, ["-" * width for width in widths], *rows):
        filled = (c + " " * (w - _cells(c)) for c, w in zip(row, widths, strict=True))
        yield "  ".join(filled).rstrip()


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours, as a module may have it in
    its name: `a\\nb`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cells(text: str) -> int:
    """How many columns of a terminal it takes."""
    if text.isascii():
        return len(text)
    shown = (c for c in text if not unicodedata.combining(c))
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown)
