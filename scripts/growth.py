"""How the time of each stage grows with the size of the graph.

    python scripts/growth.py            1,000 and 10,000 nodes
    python scripts/growth.py --full     100,000 as well

Four shapes of graph: a chain of linear layers and activations, transformer blocks around a
float32 residual stream, blocks around a stream whose precision is free, and blocks that all read
one value and are joined by one operator. A block is captured once and then repeated, with fake
tensors of its own for every node. The last columns compare a
size with the one before it: ten times the nodes should take no more than twelve times the time.
Ends with an error if a stage takes more, or all together. Times are the process's own, so that what
else the computer does counts little. `annotate` includes the flow graph, which paint and place
casts are given.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_graph.capture.retrace import trace
from amp_graph.flow import flow_graph
from amp_graph.graphs.fake import fake_mode_of
from amp_graph.ir import Plan
from amp_graph.passes.annotate import annotate
from amp_graph.passes.emit import emit
from amp_graph.passes.paint import paint
from amp_graph.passes.place_casts import place_casts
from amp_graph.passes.verify import verify
from amp_graph.policy import Policy

SIZES = (1_000, 10_000, 100_000)
MAX_RATIO = 12.0
TOO_SHORT = 0.05  # seconds; a ratio to less is noise
RUNS = 2  # of each stage, of which the faster counts
STAGES = ("annotate", "paint", "place_casts", "emit", "verify")
WIDTH, HEADS = 16, 2
MATMUL, CAT = torch.ops.aten.matmul.default, torch.ops.aten.cat.default


def chain_block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Every colour, and a value that is read twice."""
    h = F.gelu(x @ w)
    h = torch.relu(h @ v) * h
    return F.layer_norm(h.reshape(-1, WIDTH) + 1.0, (WIDTH,))


def transformer_block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Attention and an MLP; x goes on in float32, from block to block."""
    h = F.layer_norm(x, (WIDTH,))
    q, k, u = (h @ w).view(-1, HEADS, 3 * WIDTH // HEADS).transpose(0, 1).chunk(3, -1)
    scores = (q @ k.transpose(-1, -2)) * 0.25
    x = x + (scores.softmax(-1) @ u).transpose(0, 1).reshape(-1, WIDTH) @ v
    h = F.gelu(F.layer_norm(x, (WIDTH,)) @ v)
    return x + (h @ v).mul_(0.5)


def residual_block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """As in a residual ConvNet, where one free region reaches from the first block to the last."""
    return torch.relu(x + torch.tanh(x @ w) @ v)


def joined_block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Free from the one value that all blocks read to the operator that joins them."""
    return torch.relu(x)


class Shape(NamedTuple):
    """Blocks, the shape of their first weight, whether the stream starts in low precision, and
    whether all blocks read that, and are joined at the end."""

    block: Callable[..., Tensor]
    weight: tuple[int, int] = (WIDTH, WIDTH)
    is_low: bool = False
    joins: bool = False


SHAPES = {
    "chain": Shape(chain_block),
    "transformer": Shape(transformer_block, (WIDTH, 3 * WIDTH)),
    "residual": Shape(residual_block, is_low=True),
    "joined": Shape(joined_block, is_low=True, joins=True),
}


def repeated(shape: Shape, size: int) -> fx.GraphModule:
    """A graph of about `size` nodes, the block's output fed to its first input again.

    Every block has weights of its own. Views keep sharing memory with what they view.
    """
    inputs = torch.rand(WIDTH, WIDTH), torch.rand(shape.weight), torch.rand(WIDTH, WIDTH)
    block = trace(shape.block, inputs)
    graph, mode = fx.Graph(), fake_mode_of(block)
    x, *weights = (n for n in block.graph.nodes if n.op == "placeholder")
    body = [n for n in block.graph.nodes if n.op not in ("placeholder", "output")]
    (result,) = next(n for n in block.graph.nodes if n.op == "output").all_input_nodes
    with mode or torch.no_grad():
        value = _input(graph, x, "x", is_parameter=False)
        if shape.is_low:
            value = _call(graph, MATMUL, value, value)
        results = []
        while len(graph.nodes) < size:
            new = {x: value}
            for weight in weights:
                new[weight] = _input(graph, weight, f"w_{len(graph.nodes)}", is_parameter=True)
            _copy(graph, body, new)
            results.append(new[result])
            value = value if shape.joins else new[result]
        value = _call(graph, CAT, results) if shape.joins else value
    graph.output(value).meta["val"] = value.meta["val"]
    return fx.GraphModule(torch.nn.Module(), graph)


def _call(graph: fx.Graph, operator: Any, *args: Any) -> fx.Node:
    node = graph.call_function(operator, args)
    node.meta["val"] = operator(*fx.node.map_arg(args, lambda operand: operand.meta["val"]))
    return node


def _input(graph: fx.Graph, like: fx.Node, name: str, *, is_parameter: bool) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {"val": like.meta["val"].clone(), "is_parameter": is_parameter}
    return node


def _copy(graph: fx.Graph, body: list[fx.Node], new: dict[fx.Node, fx.Node]) -> None:
    """Append the body, with new fake tensors that share storage as the old ones did."""
    storages = {n.meta["val"].untyped_storage()._cdata: new[n].meta["val"] for n in new}

    def renewed(old: Tensor) -> Tensor:
        key = old.untyped_storage()._cdata
        base = storages.get(key)
        if base is None:
            storages[key] = base = torch.empty(old.untyped_storage().nbytes() // old.itemsize)
        return base.as_strided(old.shape, old.stride(), old.storage_offset())

    for node in body:
        copy = graph.node_copy(node, lambda arg: new[arg])
        copy.meta = {"val": tree_map_only(Tensor, renewed, node.meta["val"])}
        new[node] = copy


def timed_stages(module: fx.GraphModule, policy: Policy) -> Iterator[float]:
    """Seconds of each stage in the order of STAGES."""
    lists = policy.load_lists()
    dtype = policy.dtype_for({"cpu"})

    def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        seconds = []
        for _ in range(RUNS):
            gc.collect()
            gc.disable()  # as timeit does: its pauses grow with all that is alive
            start = time.process_time()
            result = function(*args)
            seconds.append(time.process_time() - start)
            gc.enable()
        return result, min(seconds)

    facts, seconds = timed(annotate, module, lists, dtype)
    flow, more = timed(flow_graph, facts)
    yield seconds + more
    paints, seconds = timed(paint, facts, flow, lists, policy, dtype)
    yield seconds
    low, seconds = timed(place_casts, facts, flow, paints)
    yield seconds
    emitted, seconds = timed(emit, module, facts, paints, low, dtype, lists, {})
    yield seconds
    plan = Plan(dtype, facts, paints, low, emitted.casts)
    yield timed(verify, module, emitted.module, plan)[1]


def measure(shapes: list[str], sizes: list[int]) -> dict[tuple[str, int], list[float]]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    policy, found = Policy("bfloat16"), dict[tuple[str, int], list[float]]()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for shape in shapes:
            list(timed_stages(repeated(SHAPES[shape], 100), policy))  # imports and first calls
            for size in sizes:
                task = progress.add_task(f"{shape}, {size:,} nodes: build", total=len(STAGES))
                module = repeated(SHAPES[shape], size)
                found[shape, size] = []
                for stage, seconds in zip(STAGES, timed_stages(module, policy), strict=True):
                    found[shape, size].append(seconds)
                    progress.update(task, advance=1, description=f"{shape}, {size:,}: {stage}")
    return found


def report(found: dict[tuple[str, int], list[float]], sizes: list[int]) -> bool:
    """Print one table per shape; whether all ratios are within bounds."""
    linear = True
    for shape in dict.fromkeys(shape for shape, _ in found):
        table = Table("stage", title=shape, title_justify="left")
        for i, size in enumerate(sizes):
            table.add_column(f"{size:,}", justify="right")
            if i:
                table.add_column(f"/ {sizes[i - 1]:,}", justify="right")
        rows = {row: [found[shape, size][i] for size in sizes] for i, row in enumerate(STAGES)}
        rows["together"] = [sum(found[shape, size]) for size in sizes]
        for row, seconds in rows.items():
            cells = [row, f"{seconds[0]:.3f} s"]
            for before, after in pairwise(seconds):
                ratio = round(after / before, 1)
                bad = ratio > MAX_RATIO and before > TOO_SHORT
                linear = linear and not bad
                cells += [f"{after:.3f} s", f"[{'red' if bad else 'green'}]{ratio:.1f}[/]"]
            table.add_row(*cells, end_section=row == STAGES[-1])
        Console().print(table)
    return linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="measure 100,000 nodes as well")
    parser.add_argument("--shape", choices=[*SHAPES], action="append", help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = list(SIZES if arguments.full else SIZES[:-1])
    found = measure(arguments.shape or [*SHAPES], sizes)
    if not report(found, sizes):
        sys.exit(f"a stage takes more than {MAX_RATIO:g} times as long for ten times the nodes")


if __name__ == "__main__":
    main()
