"""How far a mixed-precision run of a case is from its float32 run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from amp_graph.cpu import emulates

from .case import Case, floating_outputs

# Below this an error is float32 rounding, of which no ratio means anything.
NEGLIGIBLE = 1e-6
Around = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Step:
    """One forward and backward: its loss; its outputs and gradients, each as one vector."""

    loss: torch.Tensor
    outputs: torch.Tensor
    gradient: torch.Tensor


@dataclass(frozen=True)
class Errors:
    """Relative errors against float32, one per batch.

    The loss is one number per batch, in which errors cancel by chance: of two runs under the
    same autocast, alike but for weights a third of a percent larger, the mean of |error| over 5
    batches differs by more than 1.2 times in four models of ten, over 20 batches in two of ten.
    Errors of outputs and gradients are norms over many numbers. A batch where a router or a
    ReLU flips dominates their mean, not their median: over 20 batches the medians differ by
    more than 1.2 times in no model (gradients) and in one of fifty (outputs).
    """

    loss: tuple[float, ...]
    outputs: tuple[float, ...]
    gradient: tuple[float, ...]

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(self, name))

    def typical(self, name: str) -> float:
        return statistics.median(getattr(self, name))


@contextmanager
def autocast(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Without oneDNN on a CPU for which it has no kernels: PyTorch hands it LSTMs all the same."""
    lacks_kernels = device == "cpu" and emulates(dtype)
    without = torch.backends.mkldnn.flags(enabled=False) if lacks_kernels else nullcontext()
    with without, torch.autocast(device, dtype):
        yield


def for_autocast(case: Case) -> nn.Module:
    """The model with products that autocast has a rule for: it has none for the operator by which
    transformers multiplies by all experts at once, and would leave them in float32."""
    model = case.make()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    return model


def vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.cat([t.detach().double().flatten() for t in flat])


def step(
    case: Case,
    model: nn.Module,
    seed: int,
    size: int = 0,
    around: Around = nullcontext,
    scale: float = 1.0,
) -> Step:
    """One forward, in the context that `around` makes, and one backward, outside of it, of the
    loss times `scale`, by which gradients are divided."""
    model.zero_grad(set_to_none=True)
    args, kwargs = on_device_of(model, case.batch(seed, size))
    with around():
        output = model(*args, **kwargs)
    loss = case.loss(output)
    (loss * scale).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    outputs = [t for t in floating_outputs(output) if t.dim()]
    return Step(loss.detach().double(), vector(outputs), vector(grads) / scale)


def on_device_of(model: nn.Module, tree: Any) -> Any:
    device = next(model.parameters()).device
    return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, tree)


def steps(
    case: Case,
    model: nn.Module,
    batches: int,
    around: Around = nullcontext,
    scale: float = 1.0,
) -> list[Step]:
    """Batches in a row at unchanged weights; what forward writes into buffers stays written."""
    return [step(case, model, seed, around=around, scale=scale) for seed in range(batches)]


def errors(reference: Sequence[Step], measured: Sequence[Step]) -> Errors:
    pairs = list(zip(reference, measured, strict=True))
    return Errors(
        *(
            tuple(distance(getattr(r, f.name), getattr(m, f.name)) for r, m in pairs)
            for f in fields(Errors)
        )
    )


def distance(reference: torch.Tensor, measured: torch.Tensor) -> float:
    """Relative, in the 2-norm; infinite where the measured is not finite."""
    found = float((measured - reference).norm() / reference.norm().clamp(min=1e-30))
    return found if found == found else float("inf")


def ratio(ours: float, theirs: float) -> float:
    return 1.0 if ours < NEGLIGIBLE else ours / max(theirs, NEGLIGIBLE)


def excess(ours: Sequence[float], theirs: Sequence[float], allowed: float) -> float:
    """By how many standard errors mean(ours) exceeds `allowed` times mean(theirs)."""
    over = [o - allowed * t for o, t in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(over) / len(over) ** 0.5
    return statistics.fmean(over) / max(spread, NEGLIGIBLE)
