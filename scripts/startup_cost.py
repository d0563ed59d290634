"""What amp_graph_startup.pth costs every start of Python that does not import torch, while
AMP_GRAPH_ENABLE is not set and where it is.

Usage: .venv/bin/python scripts/startup_cost.py [--runs 300]

Starts Python in turns with the .pth file and with an empty one of the same name in the only folder
whose .pth files are read, prints the medians of processor time and their differences, and how far
two series of the same kind are apart by chance. Also prints how long the line alone takes.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

PTH = Path(__file__).parent.parent / "amp_graph_startup.pth"
START = "import site; site.addsitedir({folder!r})"


def processor_time() -> float:
    """That of the processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="starts of each kind")
    runs = parser.parse_args().runs
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AMP_GRAPH_")}
    with tempfile.TemporaryDirectory() as folder:
        line = PTH.read_text()
        kinds = {"without": "", "with": line, "enabled": line, "without again": ""}
        commands = {}
        for kind, text in kinds.items():
            place = Path(folder) / kind.replace(" ", "_")
            place.mkdir()
            (place / PTH.name).write_text(text)
            shutil.copy(PTH.parent / "_amp_graph_startup.py", place)
            commands[kind] = [sys.executable, "-S", "-c", START.format(folder=str(place))]
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(runs):
            for kind, command in commands.items():
                enabled = {"AMP_GRAPH_ENABLE": "1"} if kind == "enabled" else {}
                began = processor_time()
                subprocess.run(command, env=environment | enabled, check=True)
                times[kind].append(processor_time() - began)
    medians = {kind: 1000 * statistics.median(values) for kind, values in times.items()}
    for kind, median in medians.items():
        print(f"{kind:15} {median:8.3f} ms, median of {runs} starts")
    print(f"the .pth file costs {medians['with'] - medians['without']:+.3f} ms;", end=" ")
    print(f"enabled {medians['enabled'] - medians['without']:+.3f} ms;", end=" ")
    print(f"by chance alone {medians['without again'] - medians['without']:+.3f} ms")
    os.environ.pop("AMP_GRAPH_ENABLE", None)
    number = 100_000
    compiled = compile(line, str(PTH), "exec")
    seconds = min(timeit.repeat(lambda: exec(compiled, {}), number=number, repeat=5)) / number
    print(f"its line alone takes {seconds * 1e6:.2f} microseconds")


if __name__ == "__main__":
    main()
