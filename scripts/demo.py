"""Train a small ConvNet on real handwritten digits in float32, under autocast and with amp_graph.

The three start from the same weights, see the same batches and take turns step by step, so that
whatever else the computer does slows all of them. A table compares what they reached and what they
cost. The annotated graph goes to a text file and, with all reasons, to a page for the browser.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_digits import BATCH, Batches, DigitNet, load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import amp_graph
from amp_graph.cpu import emulates
from amp_graph.inspection.plan_text import render

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from counting import CastCounter, MatmulCounter

WIDTH, WIDTH_IF_EMULATED = 32, 8  # the latter takes minutes less; see `amp_graph.cpu`
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 5  # left out of the step time: capture and first allocations happen there
MAX_ACCURACY_DROP = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXCERPT_LINES = 14


@dataclass
class Contestant:
    """A model in training, the context that its forward pass runs in, and how training went."""

    model: nn.Module
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.context():
            return F.cross_entropy(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> None:
        start = time.perf_counter()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)


@dataclass(frozen=True)
class Result:
    """What a contestant reached, and what one forward pass of it costs: bytes read and written
    by casts, and those of all that autograd keeps for backward besides the parameters."""

    accuracy: float
    loss: float
    step_seconds: float
    first_step_seconds: float
    low_products: int
    products: int
    casts: int
    cast_bytes: int
    kept_bytes: int


ROWS: dict[str, Callable[[Result], str]] = {
    "test accuracy": lambda r: f"{r.accuracy:.1%}",
    "training loss, mean of last epoch": lambda r: f"{r.loss:.5f}",
    "step time, median": lambda r: f"{1000 * r.step_seconds:.2f} ms",
    "first step, with any capture": lambda r: f"{r.first_step_seconds:.2f} s",
    "convolutions and matmuls in low precision": lambda r: f"{r.low_products} of {r.products}",
    "casts in forward": lambda r: str(r.casts),
    "bytes moved by these casts": lambda r: f"{r.cast_bytes / 2**20:.2f} MiB",
    "bytes kept for backward": lambda r: f"{r.kept_bytes / 2**20:.2f} MiB",
}


def main() -> int:
    options = parse_arguments()
    console = Console()
    torch.set_num_threads(options.threads)
    batches, test_set = load(options.device)
    dtype = DTYPES[options.dtype]
    is_emulated = torch.device(options.device).type == "cpu" and emulates(dtype)
    width = WIDTH_IF_EMULATED if is_emulated else WIDTH
    trained = contestants(options.device, dtype, width)
    train(trained, batches, options.epochs, console)
    sample = next(iter(batches))
    results = [measure(contestant, len(batches), sample, test_set) for contestant in trained]
    table = Table("", title=f"ConvNet of width {width} on handwritten digits, batches of {BATCH}")
    for name in ("float32", f"autocast\n{options.dtype}", f"amp_graph\n{options.dtype}"):
        table.add_column(name, justify="right")
    for label, cell in ROWS.items():
        table.add_row(label, *map(cell, results))
    console.print(table)
    converted = trained[-1].model
    if not amp_graph.plans(converted):
        console.print("[red]amp_graph captured no graph of the model: nothing was converted.")
        return 1
    write_graph(converted, options.output, console)
    return verdict(results[0], results[-1], console)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    dtype_help = "the low precision; float16 is slow on most CPUs"
    threads_help = "processor threads; one makes step times steady on a busy computer"
    dump = Path("amp_graph_dump/demo.txt")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the data")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=dtype_help)
    parser.add_argument("--device", default="cpu", help="where to train, for example cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help=threads_help)
    parser.add_argument("--output", type=Path, default=dump, help="file for the annotated graph")
    options = parser.parse_args()
    if min(options.epochs, options.threads) < 1:
        parser.error("--epochs and --threads must be at least 1")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA device")
    return options


def contestants(device: str, dtype: torch.dtype, width: int) -> list[Contestant]:
    """float32, autocast and amp_graph, in this order."""

    def fresh_model() -> nn.Module:
        torch.manual_seed(0)
        return DigitNet(width).to(device)

    autocast = partial(torch.autocast, torch.device(device).type, dtype)
    return [
        Contestant(fresh_model()),
        Contestant(fresh_model(), autocast),
        Contestant(amp_graph.convert(fresh_model(), policy=dtype)),
    ]


def train(trained: list[Contestant], batches: Batches, epochs: int, console: Console) -> None:
    text, losses = TextColumn("{task.description}"), TextColumn("{task.fields[losses]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), losses)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs * len(batches), losses="")
        for _ in range(epochs):
            for x, y in batches:
                for contestant in trained:
                    contestant.step(x, y)
                last = " / ".join(f"{c.losses[-1]:.3f}" for c in trained)
                progress.update(task, advance=1, losses=f"loss {last}")


def measure(contestant: Contestant, steps: int, sample: list[Tensor], test: list[Tensor]) -> Result:
    """The loss is that of the last `steps`; costs are those of one batch, loss included."""
    reached = accuracy(contestant, *test)
    with MatmulCounter() as products, CastCounter() as casts:
        contestant.loss(*sample)
    return Result(
        accuracy=reached,
        loss=statistics.fmean(contestant.losses[-steps:]),
        step_seconds=statistics.median(contestant.seconds[WARM_UP_STEPS:]),
        first_step_seconds=contestant.seconds[0],
        low_products=sum(n for (_, d), n in products.forward.items() if d is not torch.float32),
        products=products.forward.total(),
        casts=casts.forward.casts,
        cast_bytes=casts.forward.bytes,
        kept_bytes=bytes_kept(contestant, *sample),
    )


@torch.no_grad()
def accuracy(contestant: Contestant, x: Tensor, y: Tensor) -> float:
    contestant.model.eval()
    with contestant.context():
        predicted = contestant.model(x).argmax(dim=1)
    contestant.model.train()
    return (predicted == y).float().mean().item()


def bytes_kept(contestant: Contestant, x: Tensor, y: Tensor) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in contestant.model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their addresses from being reused

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        contestant.loss(x, y)
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in parameters)


def write_graph(model: nn.Module, path: Path, console: Console) -> None:
    plans = amp_graph.plans(model)
    parts = [f"# graph {i} of {len(plans)}\n{render(p)}" for i, p in enumerate(plans, 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts), encoding="utf-8")
    page, *_ = amp_graph.dump(model, path.with_suffix(""))
    console.print(f"All there is to see, in a browser: [bold]{page}[/bold]", soft_wrap=True)
    console.print(f"Annotated graph: [bold]{path}[/bold], from its first convolution on:\n")
    lines = render(plans[0]).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("allow ")), 2)
    for line in lines[start - 2 :][:EXCERPT_LINES]:
        shown = line[: console.width] if console.is_terminal else line
        console.print(shown, soft_wrap=True, markup=False, highlight=False)
    console.print()


def verdict(float32: Result, converted: Result, console: Console) -> int:
    """The exit status: 0 if the converted model computed in low precision and lost nothing."""
    drop = 100 * (float32.accuracy - converted.accuracy)
    allowed = 100 * MAX_ACCURACY_DROP
    if converted.low_products < converted.products:
        complaint = "left convolutions or matmuls in float32; the annotated graph says why"
    elif drop > allowed:
        complaint = f"is {drop:.1f} points of test accuracy below float32, more than {allowed:.0f}"
    else:
        return 0
    console.print(f"[red]amp_graph {complaint}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
