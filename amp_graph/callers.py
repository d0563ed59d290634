"""The frames that a call came through, and whose code they run: this package's, PyTorch's,
Python's, or the user's, as which libraries count, too."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

OURS, PYTORCHS = (f"{Path(file).parent}{os.sep}" for file in (__file__, str(torch.__file__)))
IMPORTING = "<frozen importlib._bootstrap"
PYTHONS = f"{sysconfig.get_path('stdlib')}{os.sep}"


def is_ours(file: str) -> bool:
    return file.startswith(OURS)


def is_pythons(file: str) -> bool:
    return file.startswith(PYTHONS) and "-packages" not in file  # site-, or Debian's dist-


def is_users(file: str) -> bool:
    return not is_pythons(file) and not file.startswith((OURS, PYTORCHS))


def calling(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that it was called from, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def first_argument(frame: FrameType) -> Any:
    """Return what a frame has for the first argument of its code, such as `self`; None if there is
    none."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def depth_of_user(frame: FrameType) -> int:
    """Return how many frames above this one the user's first frame is; the outermost if there is
    none. Those of the import system do not count, nor do they for `warnings.warn`."""
    files = [caller.f_code.co_filename for caller in calling(frame)]
    files = [file for file in files if not file.startswith(IMPORTING)]
    return next((i for i, file in enumerate(files) if is_users(file)), len(files) - 1)


def place(file: str, line: int | None) -> str:
    """Return a place in code, as "net.py:12"."""
    return f"{Path(file).name}:{line}"
