"""Save, load and follow the plans of every model of the test zoo, and write all views of them.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/plan_round_trips.py [NAME ...]

Prints one line per model and exits with 1 if one of them fails.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import zoo

import amp_graph
from amp_graph.calls.conversion import conversion_of
from amp_graph.inspection.source import annotated_model


def converted(case: zoo.Case, plan: Path | None = None) -> torch.nn.Module:
    torch._dynamo.reset()
    model = amp_graph.convert(case.make(), policy="bfloat16", plan=plan)
    args, kwargs = case.batch(0, 0)
    model(*args, **kwargs)
    return model


def round_trip(case: zoo.Case, folder: Path) -> str:
    first = converted(case)
    plans = amp_graph.plans(first)
    written = amp_graph.dump(first, folder)
    str(amp_graph.explain(first))
    emitted = [graphs and graphs[1] for graphs in conversion_of(first).compiler.graphs]
    for graph, module in zip(annotated_model(first).after, emitted, strict=True):
        names = [n.name for n in module.graph.nodes] if module and graph.nodes else []
        assert [n.name for n in graph.nodes] == names, "a node is missing"
        assert all(n.why and n.chain for g in graph.everything() for n in g.nodes), "no reason"
    assert amp_graph.load_plan(folder / "plan.json") == plans, "the file holds other plans"
    again = converted(case, folder / "plan.json")
    assert amp_graph.plans(again) == plans, str(amp_graph.diff(plans, amp_graph.plans(again)))
    nodes = sum(len(p.facts) for p in plans)
    size = (folder / "index.html").stat().st_size
    return f"{len(plans)} graphs, {nodes} nodes, {len(written)} files, page {size >> 10} KiB"


def main() -> int:
    warnings.simplefilter("ignore")
    failed = []
    for case in zoo.cases():
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                told = round_trip(case, Path(folder))
        except Exception:
            failed.append(case.name)
            told = f"FAILED\n{traceback.format_exc()}"
        print(f"{case.name:<24} {time.perf_counter() - start:6.1f} s  {told}", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
