"""How much slower a matrix product is on this CPU in low precision than in float32.

    python scripts/emulation.py

One thread. Prints medians of paired ratios, and whether amp_graph takes the precision for emulated.
"""

from __future__ import annotations

import statistics
import time

import torch

from amp_graph.cpu import emulates

SIZES = (64, 256, 512)
TURNS = 7


def seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU kernels for {torch.backends.cpu.get_cpu_capability()}")
    for dtype in (torch.bfloat16, torch.float16):
        for size in SIZES:
            wide = torch.randn(size, size), torch.randn(size, size)
            low = wide[0].to(dtype), wide[1].to(dtype)
            seconds(*wide), seconds(*low)
            ratio = statistics.median(seconds(*low) / seconds(*wide) for _ in range(TURNS))
            print(f"{dtype}, {size} x {size}: {ratio:.1f} of float32, emulated: {emulates(dtype)}")


if __name__ == "__main__":
    main()
