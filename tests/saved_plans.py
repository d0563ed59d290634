"""A plan in a file, and changes made to it by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from nets import Net

import amp_graph


def save_net_plan(path: Path) -> Path:
    """Save the plan of a converted `Net` and forget its capture."""
    model = amp_graph.convert(Net().eval(), policy="bfloat16")
    model(torch.randn(4, 8))
    amp_graph.save_plan(amp_graph.plans(model), path)
    torch._dynamo.reset()
    return path


def edit(path: Path, change: Any) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def color(node: str, value: str) -> Any:
    """Return a change of the colour of a node, for `edit`."""

    def change(table: Any) -> None:
        table["plans"][0]["paints"][node]["color"] = value

    return change
