"""`compare` and `calibrate`: what the numbers do."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from rich.text import Text

from amp_graph.commands.command import (
    Command,
    check_files,
    factory_argument,
    out,
    plan_argument,
    policy_arguments,
    policy_of,
    working,
)
from amp_graph.commands.factory import subject
from amp_graph.numerics.calibrate import calibrate
from amp_graph.numerics.compare import compare
from amp_graph.numerics.comparison import check_drawing


def _numerics_arguments(parser: ArgumentParser) -> None:
    factory_argument(parser)
    parser.add_argument(
        "--loss-scale", type=_scale, default=1.0, help="what backward starts from (1)"
    )
    plan_argument(parser)
    policy_arguments(parser)


def _compare_arguments(parser: ArgumentParser) -> None:
    _numerics_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file, too")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the exponents of the gradients")
    parser.add_argument("--bound", type=_bound, help="exit with 1 if an error is above this")


def _compare(args: Namespace) -> int:
    check_files(args.json, args.plot)
    if args.plot:
        check_drawing(args.plot)
    made = subject(args.factory)
    with working(f"running {args.factory} in float32 and in mixed precision"):
        found = compare(
            made.model,
            made.batches[0],
            loss=made.loss,
            loss_scale=args.loss_scale,
            policy=policy_of(args),
            plan=args.plan,
        )
    out.print(found)
    if args.json:
        found.save(args.json)
    if args.plot:
        found.plot(args.plot)
    return int(args.bound is not None and not found.within(args.bound))


def _scale(text: str) -> float:
    scale = _bound(text)
    if not scale:
        raise ArgumentTypeError(f"must be a number above 0, but is {text}")
    return scale


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = -1.0
    if not bound >= 0:
        raise ArgumentTypeError(f"must be a number, not negative or NaN, but is {text}")
    return bound


def _calibrate_arguments(parser: ArgumentParser) -> None:
    _numerics_arguments(parser)
    parser.add_argument("--bound", type=_bound, required=True, help="the largest error allowed")
    parser.add_argument("--output", metavar="FILE", required=True, help="where to write the plan")


def _calibrate(args: Namespace) -> int:
    check_files(args.output)
    made = subject(args.factory)
    with working("calibrating") as progress:
        task = progress.task_ids[0]

        def tell(trial: int, error: float) -> None:
            progress.update(task, description=f"calibrating: trial {trial}, error {error:.2g}")

        found = calibrate(
            made.model,
            made.batches,
            args.bound,
            loss=made.loss,
            loss_scale=args.loss_scale,
            policy=policy_of(args),
            plan=args.plan,
            progress=tell,
        )
    found.save(args.output)
    out.print(Text(f"{found}\nwritten to {args.output}"))
    return 0


COMPARE = Command(
    "compare",
    "run float32 and mixed precision side by side and show where they part",
    "Forward and backward, node by node; the worst nodes come first.",
    _compare_arguments,
    _compare,
)

CALIBRATE = Command(
    "calibrate",
    "find the fewest nodes to keep in float32 so that the error meets a bound",
    "Writes a plan for --plan, or for convert(model, plan=...).",
    _calibrate_arguments,
    _calibrate,
)
