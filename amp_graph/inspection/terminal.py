"""Tables in a terminal, and as the text that a terminal would show."""

from __future__ import annotations

import io
from collections.abc import Container
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from amp_graph.inspection.spelling import printable


class Shown:
    """A result that prints as a terminal shows it, and shows itself so in a Python session. It has
    either what Rich draws, or text of its own."""

    WIDTH: ClassVar[int] = 120  # of the plain text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self))

    def __str__(self) -> str:
        return without_colors(self, self.WIDTH)

    def __repr__(self) -> str:
        return str(self)


def without_colors(shown: RenderableType, width: int) -> str:
    """Return the text that a terminal of this width would show, without colours, ended by a
    newline; also in a notebook, where Rich displays instead of printing, and under `FORCE_COLOR`.
    """
    text = io.StringIO()
    console = Console(
        file=text, width=width, highlight=False, force_terminal=False, force_jupyter=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def section(title: str, content: RenderableType) -> RenderableType:
    """A part of a longer text: an empty line, its title, and its content, indented."""
    return Group(Text(), Text(title, style="bold"), Padding(content, (0, 0, 0, 2)))


class _Table(Table):
    """A table with one line per cell."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_in_a_line, cells), **options)


def _in_a_line(cell: Any) -> Any:
    if isinstance(cell, Text) and not cell.plain.isprintable():
        return Text(printable(cell.plain), style=cell.style)
    if isinstance(cell, Padding):
        cell.renderable = _in_a_line(cell.renderable)
    return printable(cell) if isinstance(cell, str) else cell


def columns(
    *headings: str, right: Container[int] = (), whole: Container[int] = (), gap: int = 0
) -> Table:
    """An empty table without lines. Columns fold where there is no room, but for those, by their
    position, that are aligned to the right, as numbers, or shown whole; `gap` rows are left between
    two."""
    found = _Table(box=None, padding=(0, 2, gap, 0), header_style="dim")
    for i, heading in enumerate(headings):
        is_right = i in right
        found.add_column(
            heading,
            justify="right" if is_right else "left",
            overflow="fold",
            no_wrap=is_right or i in whole,
        )
    return found
