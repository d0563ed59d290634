"""Subcommands, and the arguments and steps that several of them share."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from amp_graph.batches import call_with
from amp_graph.commands.factory import Subject, subject
from amp_graph.convert import convert
from amp_graph.dtypes import LOW_DTYPES
from amp_graph.errors import AmpGraphError
from amp_graph.files import check_file
from amp_graph.levels import LEVELS
from amp_graph.policy import Policy
from amp_graph.snapshots import unchanged


class Out(Console):
    """Standard output, which may be closed, or a pipe that is no longer read. Raises AmpGraphError
    if it cannot be written to."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            if self.is_terminal:
                super().print(*objects, **options)
            else:  # without spaces at the ends of lines, by which Rich fills tables
                with self.capture() as told:
                    super().print(*objects, **options)
                self.file.writelines(f"{line.rstrip()}\n" for line in told.get().splitlines())
            self.file.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # for what is left in it
            if not isinstance(error, BrokenPipeError):  # whose reader has seen enough
                raise AmpGraphError(
                    f"standard output cannot be written: {error.strerror or error}"
                ) from error


out = Out(width=None if sys.stdout and sys.stdout.isatty() else 120)
progress_out = Console(stderr=True)


@dataclass(frozen=True)
class Command:
    """A subcommand. `about` is its line in the list of commands, `more` what its help adds.

    `run` returns the exit code: 0 for success, 1 for an answer of "no" (the plans differ, the error
    is above the bound). An exception becomes exit code 2.
    """

    name: str
    about: str
    more: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def factory_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "factory",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function without arguments that returns (model, batch) or (model, batch, loss)",
    )


def policy_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("what to convert, and how")
    group.add_argument("--dtype", choices=sorted(LOW_DTYPES), help="the low precision")
    group.add_argument("--level", choices=[*LEVELS], help="how far tensors are narrowed")
    group.add_argument("--lists", metavar="FILE", help="operator lists of your own, as TOML")
    group.add_argument(
        "--keep-float32",
        metavar="GLOB",
        action="append",
        default=[],
        help="modules that stay in float32; may be given several times",
    )


def plan_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--plan", metavar="FILE", help="follow the decisions saved in this file")


def policy_of(args: Namespace) -> Policy | None:
    """None if nothing of one is given: a model that the factory converted keeps its own then."""
    asked = {name: getattr(args, name) for name in ("dtype", "level", "lists")}
    given = {name: value for name, value in asked.items() if value is not None}
    if not given and not args.keep_float32:
        return None
    return Policy(**given, keep_float32=tuple(args.keep_float32))


def check_files(*files: str | None) -> None:
    """Check each file that is given, as `check_file` does."""
    for file in files:
        if file is not None:
            check_file(file)


def working(description: str) -> Progress:
    """A progress bar on standard error with one task, whose length is not known yet."""
    columns = (BarColumn(24), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    is_shown = progress_out.is_terminal  # else there would be an empty line
    progress = Progress(*columns, console=progress_out, transient=True, disable=not is_shown)
    progress.add_task(description, total=None)
    return progress


def converted(args: Namespace) -> Subject:
    with working(f"capturing {args.factory}"):
        made = subject(args.factory)
        convert(made.model, policy=policy_of(args), plan=args.plan)
        with unchanged(made.model, parameters=True):
            for batch in made.batches:
                call_with(made.model, batch)
    return made
