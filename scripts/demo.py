"""Train a small ConvNet on real handwritten digits in float32, under autocast and with amp_graph.

The three start from the same weights, see the same batches and take turns step by step, so that
whatever else the computer does slows all of them. A table compares what they reached and what they
cost; the annotated graph of the converted model goes to a text file.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_graph
from amp_graph.inspection.text import render

BATCH = 64
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 5  # left out of the step time: capture and first allocations happen there
MAX_ACCURACY_DROP = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXCERPT_LINES = 14

MATRIX_OPERATORS = {"convolution", "mm", "addmm", "bmm", "baddbmm", "linear"}


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(x + h)


class DigitNet(nn.Module):
    """Images (N, 1, 8, 8) -> scores (N, 10)."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.block1 = Residual(width)
        self.widen = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.widen_norm = nn.BatchNorm2d(2 * width)
        self.block2 = Residual(2 * width)
        self.classify = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        h = F.max_pool2d(self.block1(h), 2)
        h = F.relu(self.widen_norm(self.widen(h)))
        h = F.max_pool2d(self.block2(h), 2)
        return self.classify(h.flatten(1))


@dataclass(frozen=True)
class Digits:
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of full batches in an order that depends on the seed alone."""
        order = torch.randperm(len(self.train_x), generator=torch.Generator().manual_seed(seed))
        for chosen in order.split(BATCH):
            if len(chosen) == BATCH:
                yield self.train_x[chosen], self.train_y[chosen]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_x) // BATCH


@dataclass(frozen=True)
class Cost:
    """What one forward pass did. Bytes are those read and written by the casts, and those of
    all distinct storages that autograd kept for backward besides the parameters."""

    casts: int
    cast_bytes: int
    low_matrix_calls: int
    matrix_calls: int
    kept_bytes: int


class Contestant:
    """A model in training, and the context that its forward pass runs in."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
    ):
        self.name = name
        self.model = model
        self.context = context
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        start = time.perf_counter()
        with self.context():
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)


@dataclass(frozen=True)
class Result:
    """What a contestant reached after training, and what it cost."""

    name: str
    accuracy: float
    loss: float
    step_seconds: float
    first_step_seconds: float
    cost: Cost


class OperatorCounter(TorchDispatchMode):
    """Counts casts and matrix operators among everything that reaches a kernel."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, Dynamo (2.13) runs a captured model uncaptured under a dispatch mode."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.casts = self.cast_bytes = self.low_matrix_calls = self.matrix_calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            self.count_cast(source=args[name == "copy_"], result=result)
        if name in MATRIX_OPERATORS:
            self.matrix_calls += 1
            self.low_matrix_calls += args[-1 if name == "linear" else 0].dtype != torch.float32
        return result

    def count_cast(self, source: Tensor, result: Tensor) -> None:
        if source.dtype != result.dtype:
            self.casts += 1
            self.cast_bytes += source.nbytes + result.nbytes


def main() -> int:
    options = parse_arguments()
    console = Console()
    dtype = DTYPES[options.dtype]
    torch.set_num_threads(options.threads)
    digits = load(options.device)
    trained = contestants(options.device, dtype)
    train(trained, digits, options.epochs, console)
    results = [measure(contestant, digits) for contestant in trained]
    console.print(table_of(results, options.dtype))
    converted = trained[-1].model
    if not amp_graph.plans(converted):
        console.print("[red]amp_graph captured no graph of the model: nothing was converted.")
        return 1
    write_graph(converted, options.output, console)
    return verdict(results, console)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the data (default 8)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="the low precision (default bfloat16; float16 is slow on most CPUs)",
    )
    parser.add_argument(
        "--device", default="cpu", help="where to train, for example cpu or cuda (default cpu)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="processor threads (default 1, which makes step times steady on a busy computer)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("amp_graph_dump/demo.txt"),
        help="where to write the annotated graph (default amp_graph_dump/demo.txt)",
    )
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA device")
    return options


def load(device: str) -> Digits:
    """scikit-learn's 1797 scans of handwritten digits; a quarter is held out for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        torch.arange(len(labels)).numpy(), test_size=0.25, stratify=digits.target, random_state=0
    )
    parts = (images[train], labels[train], images[test], labels[test])
    return Digits(*(part.to(device) for part in parts))


def contestants(device: str, dtype: torch.dtype) -> list[Contestant]:
    """float32, autocast and amp_graph, in this order."""

    def fresh_model() -> nn.Module:
        torch.manual_seed(0)
        return DigitNet().to(device)

    def autocast() -> torch.autocast:
        return torch.autocast(torch.device(device).type, dtype)

    converted = amp_graph.convert(fresh_model(), policy=dtype)
    return [
        Contestant("float32", fresh_model(), contextlib.nullcontext),
        Contestant("autocast", fresh_model(), autocast),
        Contestant("amp_graph", converted, contextlib.nullcontext),
    ]


def train(trained: list[Contestant], digits: Digits, epochs: int, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs * digits.steps_per_epoch, loss="")
        for epoch in range(epochs):
            for x, y in digits.batches(seed=epoch):
                for contestant in trained:
                    contestant.step(x, y)
                losses = " / ".join(f"{c.losses[-1]:.3f}" for c in trained)
                progress.update(task, advance=1, loss=f"loss {losses}")


def measure(contestant: Contestant, digits: Digits) -> Result:
    return Result(
        name=contestant.name,
        accuracy=accuracy(contestant, digits),
        loss=statistics.fmean(contestant.losses[-digits.steps_per_epoch :]),
        step_seconds=statistics.median(contestant.seconds[WARM_UP_STEPS:]),
        first_step_seconds=contestant.seconds[0],
        cost=cost_of_forward(contestant, digits),
    )


@torch.no_grad()
def accuracy(contestant: Contestant, digits: Digits) -> float:
    model = contestant.model.eval()
    with contestant.context():
        predicted = model(digits.test_x).argmax(dim=1)
    model.train()
    return (predicted == digits.test_y).float().mean().item()


def cost_of_forward(contestant: Contestant, digits: Digits) -> Cost:
    """Measured on one training batch, loss included, in the same way for every contestant."""
    model = contestant.model
    x, y = next(digits.batches(seed=0))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their addresses from being reused

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with contestant.context():
            loss = F.cross_entropy(model(x), y)
        kept_bytes = sum(
            tensor.untyped_storage().nbytes()
            for address, tensor in kept.items()
            if address not in parameters
        )
    del loss
    with OperatorCounter() as counter, contestant.context():
        F.cross_entropy(model(x), y)
    return Cost(
        casts=counter.casts,
        cast_bytes=counter.cast_bytes,
        low_matrix_calls=counter.low_matrix_calls,
        matrix_calls=counter.matrix_calls,
        kept_bytes=kept_bytes,
    )


def table_of(results: list[Result], dtype: str) -> Table:
    table = Table(title=f"ConvNet on handwritten digits, batches of {BATCH}")
    table.add_column("")
    for result in results:
        name = result.name if result.name == "float32" else f"{result.name}\n{dtype}"
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Result], str]] = {
        "test accuracy": lambda r: f"{r.accuracy:.1%}",
        "training loss, mean of last epoch": lambda r: f"{r.loss:.5f}",
        "step time, median": lambda r: f"{1000 * r.step_seconds:.2f} ms",
        "first step, with any capture": lambda r: f"{r.first_step_seconds:.2f} s",
        "convolutions and matmuls in low precision": lambda r: (
            f"{r.cost.low_matrix_calls} of {r.cost.matrix_calls}"
        ),
        "casts in forward": lambda r: str(r.cost.casts),
        "bytes moved by these casts": lambda r: f"{r.cost.cast_bytes / 2**20:.2f} MiB",
        "bytes kept for backward": lambda r: f"{r.cost.kept_bytes / 2**20:.2f} MiB",
    }
    for label, cell in rows.items():
        table.add_row(label, *(cell(result) for result in results))
    return table


def write_graph(model: nn.Module, path: Path, console: Console) -> None:
    plans = amp_graph.plans(model)
    parts = [f"# graph {i} of {len(plans)}\n{render(p)}" for i, p in enumerate(plans, 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts), encoding="utf-8")
    console.print(f"Annotated graph: [bold]{path}[/bold], from its first convolution on:\n")
    lines = render(plans[0]).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("allow ")), 0)
    for line in lines[max(start - 2, 0) :][:EXCERPT_LINES]:
        shown = line[: console.width] if console.is_terminal else line
        console.print(shown, soft_wrap=True, markup=False, highlight=False)
    console.print()


def verdict(results: list[Result], console: Console) -> int:
    """The exit status: 0 if the converted model computed in low precision and lost nothing."""
    by_name = {result.name: result for result in results}
    converted = by_name["amp_graph"]
    drop = by_name["float32"].accuracy - converted.accuracy
    if converted.cost.low_matrix_calls < converted.cost.matrix_calls:
        console.print(
            "[red]amp_graph left convolutions or matmuls of this model in float32; "
            "the annotated graph says why."
        )
        return 1
    if drop > MAX_ACCURACY_DROP:
        console.print(
            f"[red]amp_graph is {100 * drop:.1f} points of test accuracy below float32; "
            f"more than {100 * MAX_ACCURACY_DROP:.0f} is a failure of this demo."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
