"""The patch of PyTorch by which models of scripts are converted.

Private name of PyTorch patched here: `nn.Module._compiled_call_impl`, a class attribute that
`module(...)` looks at before anything else, and that is None where `nn.Module.compile` was not
used (torch 2.11 to 2.15). A descriptor in its place sees every call that Dynamo does not inline;
Dynamo itself does not look there. `patches` has public ones.

This is the only file that reads the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp_graph.autopatch.exit_report import write_report
from amp_graph.autopatch.first_call import Models
from amp_graph.autopatch.patches import children_heard, scales_are_loaded
from amp_graph.autopatch.script_models import Model
from amp_graph.autopatch.settings import Settings, asks_to_convert
from amp_graph.calls.compiled_by_others import CALLING
from amp_graph.capture.captures import other_captures_heard
from amp_graph.errors import AmpGraphError, PolicyError, in_brief, in_words, say, telling
from amp_graph.optimizers.guards import scales_expected
from amp_graph.uncaptured import capturing, passed_over

SLOT = "_compiled_call_impl"
LAUNCHERS = (
    "torch.distributed.*",
    "torchrun",
    "accelerate.commands.*",
    "accelerate",
    "torch._inductor.*",  # its compile workers
)


class Installation:
    """The patch in place. `models` holds what became of each model."""

    def __init__(self, settings: Settings):
        self.models = Models(settings.policy, settings.verbose, self._say)
        self._policy, self._dump, self._process = settings.policy, settings.dump, os.getpid()
        self._has_reported = self._has_children = False
        self._said: set[str] = set()  # once of parts that are alike
        self._original = getattr(nn.Module, SLOT)
        self._undone = contextlib.ExitStack()
        self._undone.enter_context(telling(self._say))
        self._undone.enter_context(scales_are_loaded())
        self._undone.enter_context(scales_expected(self._scales))
        self._undone.enter_context(children_heard(self._on_child))
        self._undone.enter_context(other_captures_heard(self.models.on_compiling))
        self._patch = _EveryCall(self.models)
        setattr(nn.Module, SLOT, self._patch)

    def undo(self) -> None:
        """Restore the patched name and every model that was converted. What stays are hooks of
        optimizer steps and what only calls what it is around (in `custom_functions`,
        `explicit_scalers`)."""
        if nn.Module.__dict__.get(SLOT) is self._patch:
            setattr(nn.Module, SLOT, self._original)
        self.models.restore_all()
        self._undone.close()
        self._has_reported = True  # nothing is left to tell of
        if _installed and _installed[0] is self:
            _installed.clear()

    def begin_child(self) -> None:
        """A process of multiprocessing begins, forked or spawned. It has no exit handlers then: it
        drops multiprocessing's own, and a forked one ends without running Python's."""
        self._process, self._has_children = os.getpid(), False
        self.models.begin_child()
        Finalize(None, self.report, exitpriority=0)

    def report(self) -> None:
        """Say, once, what became of the models, unless another process is to."""
        models = self.models.seen
        is_child = multiprocessing.parent_process() is not None
        is_told = self._is_child_told_of(models) if is_child else _is_main_process(self.models.rank)
        if not is_told or self._has_reported or os.getpid() != self._process:
            return
        self._has_reported = True
        try:
            missed = dict(sorted((self.models.missed or {}).items()))
            name = self._name() if is_child else ""
            compiles, has_children = self.models.compiles, self._has_children
            write_report(models, self._dump, name, missed, compiles, has_children)
        except Exception as error:
            say(f"no report ({in_words(error)})")

    def _on_child(self) -> None:
        self._has_children = True

    def _is_child_told_of(self, models: list[Model]) -> bool:
        """Not workers, which are daemons, nor processes that only helped."""
        took_part = self.models.rank is not None or any(m.record for m in models)
        return bool(models) and took_part and not multiprocessing.current_process().daemon

    def _name(self) -> str:
        rank = self.models.rank
        return multiprocessing.current_process().name if rank is None else f"rank {rank}"

    def _scales(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether gradients of such parameters are scaled in a model that is converted."""
        dtype = self._policy.dtype_for({p.device.type for p in parameters})
        return self._policy.loss_scale_for(dtype) is not None

    def _say(self, message: str) -> None:
        if self._is_heard() and message not in self._said:
            self._said.add(message)
            say(message)

    def _is_heard(self) -> bool:
        return os.getpid() == self._process and _is_main_process(self.models.rank)


class _EveryCall:
    """Stands in for `nn.Module._compiled_call_impl`: what `module(...)` is to run, or None."""

    def __init__(self, models: Models):
        self._models = models

    @passed_over
    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None or torch.compiler.is_dynamo_compiling():  # it would trace the next line
            return None
        if sys._getframe(1).f_code is not CALLING:
            return None
        if capturing():
            return self._models.on_compiled_call(module)
        return self._models.on_call(module)


_installed: list[Installation] = []  # at most one


def install(settings: Settings | None = None) -> Installation:
    """Convert models at their first call from now on, as `settings` or else the environment says.

    A second installation is the first one. Raises PolicyError or ListError for a wrong value.
    """
    if not isinstance(settings, Settings | None):
        raise PolicyError(f"install() takes Settings, or nothing, not {in_brief(settings)}")
    if not _installed:
        _installed.append(Installation(settings or Settings.read(os.environ)))
    return _installed[0]


def enable() -> None:
    """Do what AMP_GRAPH_ENABLE=1 would have done, in this process and its children."""
    os.environ["AMP_GRAPH_ENABLE"] = "1"
    start()


def start() -> None:
    """Install what the environment asks for, and report when the process ends. Ends the process
    with one line and exit code 2 if a variable is wrong."""
    try:
        if not asks_to_convert(os.environ):
            return
        settings = Settings.read(os.environ)
    except AmpGraphError as error:
        say(" ".join(str(error).split()))
        sys.exit(2)
    installation = install(settings)
    atexit.unregister(installation.report)  # a second start reports once, too
    atexit.register(installation.report)
    register_after_fork(installation, Installation.begin_child)
    if multiprocessing.parent_process() is not None:  # it began before torch was imported
        installation.begin_child()


def _is_main_process(rank: int | None) -> bool:
    """Whether this process is no child of multiprocessing, launcher or rank above 0: `rank`, if it
    is known, or as launchers say (torchrun RANK, Lightning LOCAL_RANK alone). Not known at
    start-up: a spawned process imports torch before it says that it is one."""
    said = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    is_first = said == "0" if rank is None else rank == 0
    if multiprocessing.parent_process() is not None or not is_first:
        return False
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec else Path(sys.argv[0] if sys.argv else "").name
    return not any(fnmatch.fnmatch(name, pattern) for pattern in LAUNCHERS)
