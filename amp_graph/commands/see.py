"""`explain`, `dump` and `diff`: what was decided, and why."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from rich.text import Text

from amp_graph.commands.command import (
    Command,
    check_files,
    converted,
    factory_argument,
    out,
    plan_argument,
    policy_arguments,
    working,
)
from amp_graph.inspection.difference import diff
from amp_graph.inspection.dump import check_dump, dump
from amp_graph.inspection.explain import explain


def _explain_arguments(parser: ArgumentParser) -> None:
    factory_argument(parser)
    parser.add_argument("--depth", type=_levels, default=3, help="levels of modules to show (3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file, too")
    plan_argument(parser)
    policy_arguments(parser)


def _levels(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a number of levels, but is {text}")
    return int(text)


def _explain(args: Namespace) -> int:
    check_files(args.json)
    report = explain(converted(args).model, depth=args.depth)
    out.print(report)
    if args.json:
        report.save(args.json)
    return 0


def _dump_arguments(parser: ArgumentParser) -> None:
    factory_argument(parser)
    parser.add_argument("folder", help="where to write; made if it is missing")
    plan_argument(parser)
    policy_arguments(parser)


def _dump(args: Namespace) -> int:
    check_dump(args.folder, args.plan)
    model = converted(args).model
    with working("writing") as progress:
        task = progress.task_ids[0]

        def tell(name: str, done: int, total: int) -> None:
            progress.update(task, description=f"writing {name}", completed=done, total=total)

        written = dump(model, args.folder, progress=tell)
    page = Path(args.folder) / "index.html"
    out.print(Text(f"{len(written)} files; open {page}"), soft_wrap=True)
    return 0


def _diff_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("before", help="a plan file")
    parser.add_argument("after", help="another one")


def _diff(args: Namespace) -> int:
    difference = diff(args.before, args.after)
    out.print(difference)
    return int(bool(difference))


EXPLAIN = Command(
    "explain",
    "report what runs in low precision, what the casts cost, and what could be changed",
    "The model is converted and run once on its batch.",
    _explain_arguments,
    _explain,
)

DUMP = Command(
    "dump",
    "write every graph before and after as text, JSON, DOT, SVG and one HTML page",
    "Open index.html in a browser; plan.json can be edited and given to --plan.",
    _dump_arguments,
    _dump,
)

DIFF = Command(
    "diff",
    "compare two plan files",
    "Exits with 1 if they decide differently.",
    _diff_arguments,
    _diff,
)
