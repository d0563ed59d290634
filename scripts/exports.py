"""Export every model of the test zoo in mixed precision, beside the converted model.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/exports.py [NAME ...]

Prints a line per model: how far the program's results are from those of the converted model,
relative and in the 2-norm, and its weights over those in float32. Models that torch.export cannot
export are named. Exits with 1 if another one cannot be exported, saved and loaded.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import zoo
from zoo.case import exportable, floating_outputs

import amp_graph


def exported(case: zoo.Case) -> tuple[str, str]:
    """A word for the outcome, and what is to be told of it."""
    model, (args, kwargs) = exportable(case.make()), case.batch(0, 0)
    try:
        torch.export.export(copy.deepcopy(model), args, kwargs)
    except Exception as error:
        return "not exportable", str(error).partition("\n")[0][:80]
    program = amp_graph.export(model, args, kwargs, policy="bfloat16")
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    torch._dynamo.reset()
    converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    theirs = floating_outputs(converted(*args, **kwargs))
    ours = floating_outputs(loaded.module()(*args, **kwargs))
    distance = max(_distance(a, b) for a, b in zip(ours, theirs, strict=True))
    sizes = [sum(t.nbytes for t in of.values()) for of in (program.state_dict, model.state_dict())]
    word = "other" if distance else "equal"
    return word, f"distance {distance:.1e}, weights {sizes[0] / sizes[1]:.2f} of float32"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype is not b.dtype:
        raise AssertionError(f"a result is {a.dtype}, of the converted model {b.dtype}")
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


@torch.no_grad()
def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: Counter[str] = Counter()
    for case in zoo.cases():
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        try:
            word, told = exported(case)
        except Exception:
            word, told = "FAILED", traceback.format_exc()
        found[word] += 1
        print(f"{case.name:<24} {word:<16} {told}", flush=True)
    print(", ".join(f"{n} {word}" for word, n in found.items()))
    return bool(found["FAILED"])


if __name__ == "__main__":
    sys.exit(main())
