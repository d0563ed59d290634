"""What it costs to be able to name the operator behind an overflow, while nothing overflows.

    python scripts/watch_cost.py

Trains the demo's ConvNet twice, step by step in turns, with the loss scale on: once as `convert`
does it, and once with graphs that cannot be looked into. Prints the operators dispatched in a whole
step (forward, backward, optimizer), which have to be the same, and the median of the ratios of the
processor time of steps, with the interval that holds the true median with 95 % confidence. Ends
with an error if operators differ or if that interval lies above 1.01.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from demo import WARM_UP_STEPS, WIDTH, Contestant
from demo_digits import DigitNet, load
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from counting import DispatchCounter

import amp_graph
from amp_graph.boundary.outer import Boundary

MOST = 1.01


class Unwatched(Boundary):
    """A boundary whose graph cannot be run under observation."""

    def __init__(self, *args: Any):
        without_watched = args[:4]
        super().__init__(*without_watched)


class Operators(DispatchCounter):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.calls[name] += 1


def contestant() -> Contestant:
    torch.manual_seed(0)
    policy = amp_graph.Policy("bfloat16", loss_scale=amp_graph.LossScale())
    return Contestant(amp_graph.convert(DigitNet(WIDTH), policy=policy))


def processor_seconds(one: Contestant, x: torch.Tensor, y: torch.Tensor) -> float:
    start = time.process_time()
    one.step(x, y)
    return time.process_time() - start


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics around it that hold the true one in 95 of 100 cases."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * math.sqrt(n)
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return ordered[n // 2], ordered[max(low, 0)], ordered[min(high, n - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    batches, _ = load("cpu")
    x, y = next(iter(batches))
    watched, unwatched = contestant(), contestant()
    for _ in range(WARM_UP_STEPS):
        watched.step(x, y)
        with mock.patch("amp_graph.backend.assemble.Boundary", Unwatched):
            unwatched.step(x, y)
    counts = []
    for one in (watched, unwatched):
        with Operators() as operators:
            one.step(x, y)
        counts.append(operators.calls)
    ratios = []
    for turn in track(range(options.steps), "steps", console=console, transient=True):
        pair = (watched, unwatched) if turn % 2 else (unwatched, watched)
        seconds = {one.model: processor_seconds(one, x, y) for one in pair}
        ratios.append(seconds[watched.model] / seconds[unwatched.model])
    median, low, high = median_and_interval(ratios)
    console.print(f"operators in a step: {counts[0].total()} and {counts[1].total()} without")
    interval = f"{low:.4f} to {high:.4f}"
    console.print(f"step time: {median:.4f} times ({interval}) that without, {len(ratios)} pairs")
    return int(counts[0] != counts[1] or low > MOST)


if __name__ == "__main__":
    sys.exit(main())
