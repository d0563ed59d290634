"""Files that results are written to: complete, or as they were."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net

import amp_graph
from amp_graph import AmpGraphError
from amp_graph.files import write_whole


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text("old")
    return path


@pytest.fixture
def savers() -> dict[str, Callable[[Path], object]]:
    model, x = amp_graph.convert(Net(), policy="bfloat16"), torch.randn(4, 8)
    model(x)
    compared = amp_graph.compare(model, x)
    return {
        "plan.json": partial(amp_graph.save_plan, amp_graph.plans(model)),
        "report.json": amp_graph.explain(model).save,
        "compared.json": compared.save,
        "gradients.svg": compared.plot,
    }


def test_what_cannot_be_written_stays_as_it_was(
    savers: dict[str, Callable[[Path], object]], tmp_path: Path
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, save in savers.items():
        (tmp_path / name).write_text("old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))  # as on a full disk
        try:
            with pytest.raises(AmpGraphError, match=rf"{name}: cannot be written: File too large"):
                save(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert (tmp_path / name).read_text() == "old", name
    assert {path.name for path in tmp_path.iterdir()} == {*savers}


def test_permissions_stay(file: Path) -> None:
    file.chmod(0o640)
    write_whole(file, "new")
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_behind_a_link_the_file_is_written(file: Path) -> None:
    link = file.with_name("link.json")
    link.symlink_to(file.name)
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "new")
    reader.join(10)
    assert read == ["new"] and pipe.is_fifo()


def test_a_file_that_cannot_be_replaced_is_written_in_place(file: Path, monkeypatch: Any) -> None:
    def is_mounted(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", is_mounted)
    write_whole(file, "new")
    assert file.read_text() == "new"
    assert [*file.parent.iterdir()] == [file]
