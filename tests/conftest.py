"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import signal
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._logging._internal import trace_log

from amp_graph.autopatch import Installation, Settings, install
from amp_graph.optimizers import guards

# pytest would listen to all loggers, and have Dynamo tell all that it does to this one, which else
# nobody hears: 6 % of the time of the tests that capture.
trace_log.handlers.clear()
trace_log.addHandler = lambda handler: None  # type: ignore[method-assign]

# For devices that are not there, PyTorch keeps where each seed was set, with the lines of all the
# frames: a third of the time of tests that set seeds deep inside of hypothesis.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]

# Nor does anybody read the settings that each capture writes down.
torch._dynamo.utils._scrubbed_inductor_config_for_logging = lambda: None

gc.set_threshold(20_000)  # from 700 objects made, a collection for which takes 3 % of the time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else scripts would inherit it


@pytest.fixture(autouse=True, scope="module")
def settled_heap() -> None:
    """What imports and the files before left, a million objects in the end, is not walked by each
    garbage collection; that took a fifth of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that a test expects do not depend on the machine."""
    monkeypatch.setattr("amp_graph.calls.first_report.emulates", lambda dtype: False)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told once per process is told in each test."""
    monkeypatch.setattr("amp_graph.errors._told", set())


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing captured before, and the same random numbers in each test."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def no_other_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """What spilled out of a model of another test, if that still lives, is not looked at."""
    monkeypatch.setattr(guards, "_scales", weakref.WeakValueDictionary())


@pytest.fixture
def whole_models() -> Iterator[None]:
    """For tests that capture whole models: nothing of the model before is left in Dynamo or in
    memory, and one thread, so that several workers do not get in each other's way."""
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def start() -> Iterator[Callable[..., Installation]]:
    """Installs the patch with the AMP_GRAPH_ variables given; all is undone after the test."""
    installed = []

    def start(**variables: str) -> Installation:
        settings = Settings.read({f"AMP_GRAPH_{name}": v for name, v in variables.items()})
        installed.append(install(settings))
        return installed[-1]

    yield start
    for installation in installed:
        installation.undo()


@pytest.fixture
def traced(monkeypatch) -> None:
    """Inductor's C++ takes seconds for each graph. In its place graphs are traced with their
    backward, functionalised and partitioned as for Inductor, and then run operator by operator."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    as_for_inductor = aot_autograd(
        fw_compiler=boxed_nop,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        return as_for_inductor(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)


@pytest.fixture
def graphs(traced, monkeypatch) -> list[fx.GraphModule]:
    """What is handed over to Inductor."""
    seen = []
    compile_fx = torch._inductor.compile_fx.compile_fx

    def look(graph: fx.GraphModule, *args: Any, **options: Any) -> Any:
        seen.append(graph)
        return compile_fx(graph, *args, **options)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", look)
    return seen
