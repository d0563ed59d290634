"""`export`: a model as a program in mixed precision, in a file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from io import BytesIO

import torch
from rich.text import Text

from amp_graph.batches import arguments_of
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
from amp_graph.errors import AmpGraphError
from amp_graph.export import export
from amp_graph.files import write_whole
from amp_graph.inspection.spelling import byte_count


def _export_arguments(parser: ArgumentParser) -> None:
    factory_argument(parser)
    parser.add_argument("output", metavar="FILE", help="where to write the program (.pt2)")
    plan_argument(parser)
    policy_arguments(parser)


def _export(args: Namespace) -> int:
    check_files(args.output)
    if not args.output.endswith(".pt2"):
        raise AmpGraphError(f"{args.output}: is to be a program; give a file that ends in .pt2")
    with working(f"exporting {args.factory}"):
        made = subject(args.factory)
        batch = arguments_of(made.batches[0])
        with torch.no_grad():
            program = export(made.model.eval(), *batch, policy=policy_of(args), plan=args.plan)
        torch.export.save(program, data := BytesIO())  # on a full disk it ends the process
    write_whole(args.output, data.getvalue())
    before, after = map(_size, (made.model.state_dict(), program.state_dict))
    told = f"{args.output}: weights of {after}, {before} in the model"
    out.print(Text(told), soft_wrap=True)
    return 0


def _size(tensors: Mapping[str, torch.Tensor]) -> str:
    return byte_count(sum(tensor.nbytes for tensor in tensors.values()))


EXPORT = Command(
    "export",
    "write the model as a program in mixed precision, which torch.export.load reads",
    "The model is exported in evaluation mode, for batches of the size of its first one.",
    _export_arguments,
    _export,
)
