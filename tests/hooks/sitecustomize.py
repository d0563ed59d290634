"""Counts what a script really runs, without the script's knowing: Python imports this module at
start-up if its folder is on PYTHONPATH. At the end, counts-RANK-PROCESS.json lies in the folder
that COUNTS names.
"""

import atexit
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


class CountAfterTorch:
    """A finder that finds torch as the others would, and starts the counters after its import."""

    is_asking_the_others = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.is_asking_the_others:
            return None
        self.is_asking_the_others = True
        spec = importlib.util.find_spec("torch")
        self.is_asking_the_others = False
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            start()

        spec.loader.exec_module = exec_module
        return spec


def start():
    spec = importlib.util.spec_from_file_location("counting", TESTS / "counting.py")
    counting = sys.modules["counting"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counting)

    class Casts(counting.CastCounter):
        """Those of the graphs: refreshing the low-precision weights is none of them."""

        def record(self, name, args, result):
            if name != "_foreach_copy_":
                super().record(name, args, result)

    products, casts, operators = counting.MatmulCounter(), Casts(), counting.OperatorCounter()
    operators.watch_graphs()
    products.__enter__()
    casts.__enter__()

    def write():
        if multiprocessing.parent_process() is not None:
            return  # a worker
        counts = {"casts": casts.forward.casts, "cast_bytes": casts.forward.bytes}
        counts |= {"operators": operators.total, "operators_low": operators.low}
        for phase, calls in (("forward", products.forward), ("backward", products.backward)):
            low = [n for (_, dtype), n in calls.items() if dtype in counting.LOW]
            counts |= {phase: calls.total(), f"{phase}_low": sum(low)}
        name = f"counts-{os.environ.get('RANK', 0)}-{os.getpid()}.json"
        (Path(os.environ["COUNTS"]) / name).write_text(json.dumps(counts))

    atexit.register(write)


if "COUNTS" in os.environ:
    sys.meta_path.insert(0, CountAfterTorch())
