"""What does not depend on the machine: counts and bytes of one step, and seconds of its stages."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench_variants import Variant
from counting import CASTS, COPIES, LOW, DispatchCounter, tensors
from torch._dynamo.utils import compilation_time_metrics
from torch.profiler import profile

from amp_graph.backend import decide
from amp_graph.capture.surroundings import can_watch

READS_BACK = frozenset(["_local_scalar_dense", "is_nonzero", "nonzero", "equal", "_to_host"])
PASS = ("split_as_saved", "rewrite", "lift_weights")
STAGES: dict[str, Any] = dict.fromkeys((*PASS, "retrace"), decide)


@dataclass
class Counters:
    """One step of one variant. Operators inside of compiled graphs are not seen."""

    operators: int = 0
    casts: int = 0
    cast_bytes: int = 0
    host_reads: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0


class Launches(DispatchCounter):
    """Counts operators, and casts by call rather than by tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()

    def record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self.counters.operators += 1
        self.counters.host_reads += name in READS_BACK
        if name not in CASTS | COPIES:
            return
        pairs = zip(tensors(args[0]), tensors(result if name in CASTS else args[1]), strict=False)
        moved = sum(
            a.numel() * (a.element_size() + b.element_size())
            for a, b in pairs
            if torch.float32 in (a.dtype, b.dtype) and {a.dtype, b.dtype} & set(LOW)
        )
        self.counters.casts += moved > 0
        self.counters.cast_bytes += moved


class Saved:
    """Bytes of distinct memory that autograd keeps for backward, apart from what lives on between
    steps: parameters, data, and amp_graph's low-precision weights. Those are in the peak."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self._own = _storages()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.memory[storage.data_ptr()] = storage.nbytes()
        return tensor


def count(variant: Variant, resident: int, is_captured: bool) -> Counters:
    """Counters of one step, after those that warm up. `resident`: bytes held between steps.

    Before torch 2.13 what Dynamo captured does not run while operators are counted, so that there
    are no such counts of it.
    """
    timed, variant.region = variant.region, variant.counted or variant.region
    try:
        return _count(variant, resident, is_captured)
    finally:
        variant.region = timed


def _count(variant: Variant, resident: int, is_captured: bool) -> Counters:
    launches = Launches()
    if can_watch() or not is_captured:
        with launches:
            variant.step()
    counters = launches.counters
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        variant.forward()
    counters.saved_bytes = sum(saved.memory.values())
    counters.peak_bytes = resident + _peak(variant.step, variant.device)
    if variant.device == "cuda":
        counters.host_reads = _synchronisations(variant.step)
    return counters


def resident_bytes(device: str) -> int:
    """Bytes of all tensors alive."""
    if device != "cuda":
        return sum(_storages().values())
    gc.collect()
    return torch.cuda.memory_allocated()


def _storages() -> dict[int, int]:
    """Address and bytes of the memory of all tensors alive."""
    gc.collect()
    found = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            with contextlib.suppress(RuntimeError):  # a CUDA graph has written over it
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _peak(step: Callable[[], None], device: str) -> int:
    """Bytes allocated at most during a step, above what was before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with _silent(), profile(profile_memory=True, activities=on_cpu) as found:
        step()
    peak = now = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The profiler prints when it starts and stops."""
    before = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _synchronisations(step: Callable[[], None]) -> int:
    """How often the host waits for the device in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in caught)


@dataclass
class FirstCall:
    """Seconds of a first forward and backward pass. `capture` is Dynamo's and the retrace's."""

    total: float = 0.0
    capture: float = 0.0
    rewrite: float = 0.0
    compile: float = 0.0


@contextlib.contextmanager
def first_call() -> Iterator[FirstCall]:
    """Measures what happens inside by stage."""
    found, spent = FirstCall(), dict.fromkeys(STAGES, 0.0)
    originals = {name: getattr(module, name) for name, module in STAGES.items()}

    def timed(name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return originals[name](*args)
            finally:
                spent[name] += time.perf_counter() - start

        return run

    def dynamo(stage: str) -> float:
        return sum(compilation_time_metrics.get(stage, ()))

    before = dynamo("_compile.compile_inner"), dynamo("OutputGraph.call_user_compiler")
    start = time.perf_counter()
    for name, module in STAGES.items():
        setattr(module, name, timed(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(STAGES[name], name, original)
    found.total = time.perf_counter() - start
    backend = dynamo("OutputGraph.call_user_compiler") - before[1]
    found.capture = dynamo("_compile.compile_inner") - before[0] - backend + spent["retrace"]
    found.rewrite = sum(spent[name] for name in PASS)
    found.compile = backend - found.rewrite - spent["retrace"]
