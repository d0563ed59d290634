"""A model's code may be in no module, or in one that another has the name of."""

from __future__ import annotations

import gc
import importlib.util
import runpy
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.calls.capture_cache import clear

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
SOURCE = """
import torch
from torch import nn

SCALE, COUNT = 1.0, 0

def scaled(x):
    return x * SCALE

def count(n):
    global COUNT
    COUNT += n

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(scaled(torch.relu(self.a(x)))) * SCALE

class Writes(Reads):
    def forward(self, x):
        global COUNT
        COUNT += 1
        x = super().forward(x)
        count(2)
        return x + COUNT

class WritesByDict(Reads):
    def forward(self, x):
        globals()["SCALE"] = SCALE + 1.0
        return super().forward(x)

class WritesBehindBreak(Reads):
    def forward(self, x):
        torch._dynamo.graph_break()
        globals()["SCALE"] = SCALE + 1.0
        return self.a(x) * SCALE
"""
Namespace = dict[str, Any]
Load = Callable[[Path], Namespace]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def executed(**given: Any) -> Load:
    """As runners of notebooks and scripts do."""

    def load(folder: Path) -> Namespace:
        namespace = dict(given)
        exec(SOURCE, namespace)
        return namespace

    return load


def run_by_another_script(folder: Path) -> Namespace:
    """As profilers and debuggers do, which are `__main__` themselves."""
    (folder / "train.py").write_text(SOURCE)
    found = runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return found["scaled"].__globals__


def unregistered(folder: Path) -> Namespace:
    """As plugins are loaded, beside a module `model` that is in sys.modules."""
    (folder / "plugin.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("model", folder / "plugin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def registered(folder: Path) -> Namespace:
    module = sys.modules["model"] = types.ModuleType("model")
    exec(SOURCE, vars(module))
    return vars(module)


def registered_anew(folder: Path) -> Namespace:
    """As a module is that was captured with before, changed, and imported again."""
    amp_graph.convert(registered(folder)["Reads"](), policy="bfloat16")(X)
    return registered(folder)


def pickled_by_value(folder: Path) -> Namespace:
    """As cloudpickle makes functions: with globals that are what they need of those."""
    whole = executed(__name__="__main__")(folder)
    own = {n: whole[n] for n in ("SCALE", "COUNT", "torch", "__name__", "__builtins__")}
    for name in ("scaled", "count"):
        own[name] = types.FunctionType(whole[name].__code__, own, name)

    class Reads(whole["Reads"]):
        forward = types.FunctionType(whole["Reads"].forward.__code__, own)

    class Writes(Reads):
        def forward(self, x: Tensor) -> Tensor:
            own["count"](3)
            return super().forward(x)

    own.update(Reads=Reads, Writes=Writes)
    return own


LOADS = {
    "nameless": executed(),
    "of no module": executed(__name__="nowhere_to_be_found"),
    "of a module that is not there": executed(__name__="nowhere.to.be.found"),
    "executed as __main__": executed(__name__="__main__"),
    "executed as another": executed(__name__="json"),
    "run by another script": run_by_another_script,
    "not registered": unregistered,
    "registered anew": registered_anew,
    "pickled by value": pickled_by_value,
}


class Result(NamedTuple):
    outputs: list[Tensor]
    counts: list[int]


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules with those names, whose globals are of no concern."""
    monkeypatch.setitem(sys.modules, "model", types.ModuleType("model"))
    modules = [sys.modules[name] for name in ("__main__", "json", "model")]
    for module in modules:
        monkeypatch.setattr(module, "SCALE", 7.0, raising=False)
        monkeypatch.setattr(module, "COUNT", 100, raising=False)
    yield
    assert {(module.SCALE, module.COUNT) for module in modules} == {(7.0, 100)}


def called(model: nn.Module, namespace: Namespace) -> Result:
    """In turn, while both globals are set from outside."""
    outputs, counts = [], []
    for scale in (1.0, 1.0, 3.0, -2.0, 3.0):
        namespace["SCALE"] = scale
        if scale < 0:
            namespace["COUNT"] = 50
        outputs.append(model(X).detach())
        counts.append(namespace["COUNT"])
    return Result(outputs, counts)


def both(load: Load, kind: str, folder: Path) -> tuple[nn.Module, Result, Result]:
    """The converted model, and what it and the user's own make."""
    namespace = load(folder)
    torch.manual_seed(0)
    plain = called(namespace[kind](), namespace)
    namespace = load(folder)
    torch.manual_seed(0)
    model = amp_graph.convert(namespace[kind](), policy="bfloat16")
    return model, called(model, namespace), plain


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_globals_that_it_reads_are_its_own(load: Load, tmp_path: Path) -> None:
    model, result, plain = both(load, "Reads", tmp_path)
    torch.testing.assert_close(result.outputs, plain.outputs, rtol=0.05, atol=0.05)
    plans = amp_graph.plans(model)
    assert len(plans) == 2, "one for a constant, and one for a number that changes"
    assert all(plan.low for plan in plans)


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_and_those_that_it_writes(load: Load, tmp_path: Path) -> None:
    model, result, plain = both(load, "Writes", tmp_path)
    torch.testing.assert_close(result.outputs, plain.outputs, rtol=0.05, atol=0.05)
    assert result.counts == plain.counts
    assert any(plan.low for plan in amp_graph.plans(model))


@pytest.mark.parametrize("kind", ["WritesByDict", "WritesBehindBreak"])
@pytest.mark.parametrize("load", [registered, unregistered])
def test_a_write_that_does_not_say_global_is_read(load: Load, kind: str, tmp_path: Path) -> None:
    _, result, plain = both(load, kind, tmp_path)
    torch.testing.assert_close(result.outputs, plain.outputs, rtol=0.05, atol=0.05)


class Sets(nn.Module):
    """Sets a plugin's global, and calls it."""

    def __init__(self, plugin: types.ModuleType) -> None:
        super().__init__()
        self.plugin, self.inner = [plugin], plugin.Reads()

    def forward(self, x: Tensor) -> Tensor:
        self.plugin[0].SCALE = self.plugin[0].SCALE + 1.0
        return self.inner(x)


def test_a_plugin_reads_what_it_is_set_from_outside() -> None:
    outputs = []
    for convert in (lambda model: model, amp_graph.convert):
        plugin = types.ModuleType("plugin")
        exec(SOURCE, vars(plugin))
        torch.manual_seed(0)
        outputs.append(called(convert(Sets(plugin)), vars(plugin)).outputs)
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 4), reason="a cache of Python's `inspect` keeps classes"
)
@pytest.mark.parametrize("name", ["__main__", "nowhere"])
def test_a_script_is_not_kept(name: str, tmp_path: Path) -> None:
    namespace = executed(__name__=name)(tmp_path)
    model = namespace["model"] = amp_graph.convert(namespace["Reads"](), policy="bfloat16")
    model(X).sum().backward()
    gone = weakref.ref(model)
    del namespace, model
    clear()
    gc.collect()
    assert gone() is None
