"""Messages to whoever runs a script: on standard error, where there is one."""

from __future__ import annotations

import sys


def say(*lines: str, of: str = "") -> None:
    """Print these lines. A service or a program without a window may have no standard error
    (`sys.stderr` is None), for which `print` would take standard output. `of`: which process says
    so."""
    if sys.stderr is not None:
        begin = f"amp_graph: {of}: " if of else "amp_graph: "
        sys.stderr.write("".join(f"{begin}{line}\n" for line in lines))
