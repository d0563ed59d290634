"""Files and folders that results go to."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from amp_graph.errors import AmpGraphError, in_brief


def as_path(given: Any, kind: type[AmpGraphError] = AmpGraphError) -> Path:
    """`given` as a Path. Raises `kind` for anything but a str or PathLike, and for an empty string,
    as of a variable that is not set, which is not the current folder."""
    if not isinstance(given, (str, os.PathLike)):
        raise kind(f"a path is a str or a pathlib.Path, not {in_brief(given)}")
    if not os.fspath(given):
        raise kind("a path is empty; the current folder is '.'")
    return Path(given)


def check_file(file: str | Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is for. Raises
    AmpGraphError."""
    path = as_path(file)
    if path.is_dir():
        raise AmpGraphError(f"{path}: is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise AmpGraphError(f"{path}: there is no folder {str(path.parent)!r}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise AmpGraphError(f"{path}: may not be written; give another path")


def check_folder(folder: str | Path) -> Path:
    """Refuse a folder that cannot be made or written to; its path. Raises AmpGraphError."""
    path = as_path(folder)
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not existing.is_dir():
        raise AmpGraphError(f"{path}: {str(existing)!r} is a file; give a folder")
    if not os.access(existing, os.W_OK):
        raise AmpGraphError(f"{path}: may not be written; give another folder")
    return path


def write_whole(
    file: str | Path, content: str | bytes, kind: type[AmpGraphError] = AmpGraphError
) -> None:
    """Write a file, which stays as it was if that fails: it is written beside and then moved.

    Behind a link the file itself is written. What cannot be moved to is written in place: a device
    or a pipe, a file that is mounted, or one in a folder that takes no new ones. Raises `kind`.
    """
    path = as_path(file, kind)
    data = content.encode() if isinstance(content, str) else content
    with writing(path, kind):
        if path.is_dir():
            raise kind(f"{path}: is a folder; give the path of a file")
        exists = path.exists()
        whole = path.resolve()
        if exists and not (path.is_file() and os.access(whole.parent, os.W_OK)):
            path.write_bytes(data)
            return
        beside = whole.with_name(f".{uuid4().hex}.part")
        try:
            beside.write_bytes(data)
            if exists:
                shutil.copymode(whole, beside)
            _move(beside, whole)
        finally:
            beside.unlink(missing_ok=True)


def _move(beside: Path, whole: Path) -> None:
    try:
        os.replace(beside, whole)
    except OSError:
        if not whole.exists():
            raise
        shutil.copyfile(beside, whole)


@contextlib.contextmanager
def writing(path: Path, kind: type[AmpGraphError] = AmpGraphError) -> Iterator[None]:
    """Around what writes a file: raises an error of this kind if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be written: {error.strerror or error}") from error
