"""`flex_attention` computes on low-precision operands, and is compiled as users compile it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from training import distance

import amp_graph
from amp_graph.backend import flex_attention as backend

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
HEADS, PLACES = 4, 128


class Attention(nn.Module):
    """`kind` names what is done to scores."""

    def __init__(self, kind: str = "distance") -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 192), nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.randn(HEADS) / 16)
        self.kind = kind
        self.register_buffer("document", torch.arange(PLACES) // 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.inner(x).chunk(3, -1)
        )
        found = flex_attention(q, k, v, **self.told(x.shape[1], x.device))
        return x + self.outer(found.transpose(1, 2).flatten(2))

    def told(self, size: int, device: torch.device) -> dict[str, Any]:
        if self.kind == "distance":
            return {"score_mod": lambda score, b, h, i, j: score - (i - j).abs() / 10}
        if self.kind == "learned":
            return {"score_mod": lambda score, b, h, i, j: score + self.bias[h] * (i - j)}

        def are_in_one(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return self.document[i] == self.document[j]

        return {"block_mask": create_block_mask(are_in_one, None, None, size, size, device)}


class Deep(nn.Sequential):
    def __init__(self, kind: str = "distance") -> None:
        super().__init__(*(Attention(kind) for _ in range(3)))


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x)


def gradients(model: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    call(model, x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in all but the making of kernels, which takes long, and for gradients on CPU cannot
    be done (torch 2.13)."""
    monkeypatch.setattr(backend, "inductor", torch._dynamo.lookup_backend("aot_eager"))
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(backend, "CPU_IS_SOUND", True)


@pytest.mark.parametrize("kind", ["distance", "learned", "documents"])
def test_what_users_do_to_scores_is_captured(kind: str, uncompiled: None) -> None:
    model, x = Attention(kind), torch.randn(2, PLACES, 64)
    ours = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        exact, theirs, found = model(x), in_autocast(model, x), ours(x)
    (plan,) = amp_graph.plans(ours)
    assert plan.fallback is None
    assert "flex_attention" in plan.low
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)
    linear, scores = 2 * 2 * PLACES * 64 * (192 + 64), 2 * 2 * 2 * PLACES * PLACES * 64
    assert amp_graph.explain(ours).data.modules[0].figures.flops.total == linear + scores


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients(dtype: str, uncompiled: None) -> None:
    model, x = Deep(), torch.randn(2, 32, 64)
    exact = gradients(copy.deepcopy(model), x, nn.Module.__call__)
    theirs = gradients(copy.deepcopy(model), x, in_autocast)
    found = gradients(amp_graph.convert(model, policy=dtype), x, nn.Module.__call__)
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)


def test_gradients_of_what_scores_index_are_operations_on_single_scores(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Inductor compiles into the kernel of the backward pass (on CUDA: `test_on_cuda`)."""
    seen: set[str] = set()

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if hasattr(graph, "joint_graph0"):
            seen.update(str(node.target) for node in graph.joint_graph0.graph.nodes)
        return graph

    monkeypatch.setattr(backend, "inductor", aot_autograd(fw_compiler=look))
    model = amp_graph.convert(Attention("learned"), policy="bfloat16")
    model(torch.randn(2, PLACES, 64)).square().mean().backward()
    assert "flex_lib.zeros_and_scatter.default" in seen
    assert not any(name.startswith("aten.index_put") for name in seen)


def test_a_backward_pass_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU there is no kernel of one (torch 2.13): the operator runs as it is."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(backend, "CPU_IS_SOUND", True)
    model, x = Attention(), torch.randn(2, 32, 64)
    exact = gradients(copy.deepcopy(model), x, nn.Module.__call__)
    theirs = gradients(copy.deepcopy(model), x, in_autocast)
    ours = amp_graph.convert(model, policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="is not compiled"):
        found = gradients(ours, x, nn.Module.__call__)
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)


def test_layers_that_do_the_same_share_what_is_compiled(uncompiled: None) -> None:
    model = amp_graph.convert(Deep("learned"), policy="bfloat16")
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model(torch.randn(2, PLACES, 64))
    assert counters["stats"]["unique_graphs"] == before + 2  # the model and what its layers share


def test_layers_that_do_other_things_do_not(uncompiled: None) -> None:
    model = nn.Sequential(Attention("learned"), Attention(), Attention("documents"))
    ours, x = amp_graph.convert(copy.deepcopy(model), policy="bfloat16"), torch.randn(2, PLACES, 64)
    with torch.no_grad():
        exact, theirs = model(x), in_autocast(model, x)
        before = counters["stats"]["unique_graphs"]
        found = ours(x)
    assert counters["stats"]["unique_graphs"] == before + 4
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)


@pytest.mark.skipif(
    not backend.CPU_IS_SOUND, reason="what torch 2.11 compiles for CPU overwrites other memory"
)
def test_it_is_one_kernel() -> None:
    """Without, a tensor of all scores is made."""
    model, x = Attention("learned"), torch.randn(2, PLACES, 64)
    ours = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    with torch.no_grad():
        exact, theirs = model(x), in_autocast(model, x)
        for _ in range(2):
            found = ours(x)
        with torch.profiler.profile() as profile:
            ours(x)
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)
    ran = {event.key for event in profile.key_averages()}
    assert not ran & {"aten::softmax", "aten::_softmax", "aten::bmm", "aten::exp", "aten::exp2"}


def test_where_it_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(backend, "inductor", fails)
    monkeypatch.setattr(backend, "CPU_IS_SOUND", True)
    model, x = Attention(), torch.randn(2, PLACES, 64)
    ours = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
    with torch.no_grad():
        exact, theirs = model(x), in_autocast(model, x)
        with pytest.warns(amp_graph.ConversionWarning, match="is not compiled.*no compiler"):
            found = ours(x)
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)
    assert amp_graph.plans(ours)[0].fallback is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["distance", "learned", "documents"])
def test_on_cuda(kind: str, dtype: str) -> None:
    model, x = Deep(kind).cuda(), torch.randn(2, PLACES, 64, device="cuda")
    exact = gradients(copy.deepcopy(model), x, nn.Module.__call__)
    theirs = gradients(copy.deepcopy(model), x, in_autocast)
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp_graph.ConversionWarning)
        found = gradients(amp_graph.convert(model, policy=dtype), x, nn.Module.__call__)
    assert distance(found, exact) <= 1.1 * distance(theirs, exact)
