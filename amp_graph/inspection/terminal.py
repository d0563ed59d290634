"""What a terminal would show, as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def without_colors(shown: RenderableType, width: int) -> str:
    """What a terminal of so many columns would show, as plain text that ends in a newline."""
    text = io.StringIO()
    Console(file=text, width=width, no_color=True, highlight=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
