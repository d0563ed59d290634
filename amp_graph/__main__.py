"""The command line: `amp_graph COMMAND ...` or `python -m amp_graph COMMAND ...`."""

from __future__ import annotations

import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from io import TextIOWrapper

import torch
from rich.console import Console
from rich.text import Text

import amp_graph
from amp_graph.commands import COMMANDS
from amp_graph.commands.run import RUN
from amp_graph.errors import AmpGraphError, telling

ABOUT = "See what amp_graph does to a model: what runs in which precision, and why."
EXAMPLES = """\
A model is named by a function without arguments that returns it with a batch to run it on:

    # models.py
    def small():
        return Net(), (torch.randn(4, 8),)       # or (model, [batch, batch], loss)

    amp_graph explain models:small --dtype bfloat16
    amp_graph dump models:small what_happens/
    amp_graph compare models:small --dtype float16 --plot gradients.svg
    amp_graph calibrate models:small --dtype float16 --bound 0.01 --output plan.json
    amp_graph explain models:small --plan plan.json
    amp_graph diff plan.json other_plan.json
    amp_graph export models:small small.pt2 --dtype bfloat16
    amp_graph lists aten.gelu
    amp_graph run train.py --epochs 3

Exit codes: 0 success, 1 the answer is no (plans differ, error above the bound, operator on no
list), 2 something is wrong with the arguments, the model or a file. An error that the model's own
code raises is shown with its traceback.
"""


def parser() -> ArgumentParser:
    """The parser of all commands; `args.command` is the Command chosen."""
    root = ArgumentParser(
        "amp_graph",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    versions = f"amp_graph {amp_graph.__version__}, torch {torch.__version__}"
    root.add_argument("--version", action="version", version=versions)
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        about = f"{command.about[0].upper()}{command.about[1:]}. {command.more}"
        own = commands.add_parser(command.name, help=command.about, description=about)
        command.arguments(own)
        own.set_defaults(command=command)
    return root


def _warn(message: str) -> None:
    Console(stderr=True).print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = parser().parse_args(arguments)
    if args.command is not RUN and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of dashes and names that the encoding lacks
    try:
        with telling(_warn):
            code: int = args.command.run(args)
        return code
    except AmpGraphError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return 2
    except Exception:  # the factory's or the model's own, as a rule
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
