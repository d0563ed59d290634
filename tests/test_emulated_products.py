"""`Policy(emulation="float32")`: products of low-precision values by float32 kernels.

The oracle is the same with the casts written out, which autograd differentiates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from counting import MatmulCounter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from training import Mlp, X
from zoo.measure import errors, steps

import amp_graph
from amp_graph import Policy, PolicyError
from amp_graph.backend.emulation import in_float32

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "emulated")

PRODUCTS = """
    mm bmm addmm baddbmm addbmm mv addmv matmul nn.functional.linear nn.functional.bilinear
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose2d
    nn.functional.scaled_dot_product_attention
""".split()
OPS = [
    op
    for op in op_db
    if op.name in PRODUCTS and torch.bfloat16 in op.dtypes and op.supports_autograd
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without kernels for either low precision."""
    for module in ("cpu", "calls.first_report", "backend.emulation"):
        monkeypatch.setattr(f"amp_graph.{module}.emulates", amp_graph.dtypes.LOW.__contains__)


def written_out(product: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def wide(t: Tensor) -> Tensor:
        return t.float() if t.dtype is torch.bfloat16 else t

    args, kwargs = tree_map_only(Tensor, wide, (args, kwargs))
    return tree_map_only(Tensor, lambda t: t.to(torch.bfloat16), product(*args, **kwargs))


def with_gradients(product: Callable[..., Any], sample: Any, twice: bool) -> list[Tensor]:
    """Results, gradients, and the gradients of these."""
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    results = product(*args, **kwargs)
    generator = torch.Generator().manual_seed(0)
    cotangents = torch.randn(results.shape, generator=generator).bfloat16().requires_grad_()
    first = torch.autograd.grad(results, leaves, cotangents, create_graph=twice)
    if not twice:
        return [results, *first]
    total = sum((g.float().square().sum() for g in first), torch.zeros(()))
    second = torch.autograd.grad(total, [*leaves, cotangents], allow_unused=True)
    return [results, *first, *(torch.zeros(()) if g is None else g for g in second)]


def test_products_are_in_the_database() -> None:
    assert {op.name for op in OPS} == set(PRODUCTS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_as_with_casts_written_out(op: Any) -> None:
    checked = 0
    for sample in op.sample_inputs("cpu", torch.bfloat16, requires_grad=True):
        if sample.kwargs.get("dropout_p") or not sample.input.requires_grad:
            continue
        twice = "attention" not in op.name  # the fused kernel has no second derivative
        ours = with_gradients(in_float32(op.op), sample, twice)
        theirs = with_gradients(lambda *a, **k: written_out(op.op, *a, **k), sample, twice)
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
        assert torch.equal(ours[0], theirs[0])
        checked += 1
    assert checked > 0


def converted(make: Callable[[], nn.Module], emulation: str, dtype: str = "bfloat16") -> nn.Module:
    torch.manual_seed(0)
    return amp_graph.convert(make(), policy=Policy(dtype, emulation=emulation))


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        halves = h.view(2, -1, 8)
        h.addmm_(x, self.weight)
        return halves.relu()


def test_a_product_that_is_added_in_place_reaches_views() -> None:
    x = torch.randn(4, 8)
    plain, emulating = (converted(AddsInPlace, how) for how in ("native", "float32"))
    torch.testing.assert_close(emulating(x), plain(x), rtol=2e-2, atol=2e-2)
    assert amp_graph.compare(emulating, x).outputs < 0.02


@pytest.mark.parametrize("name", ["autoencoder", "lstm", "gpt2", "bert", "resnet", "unet"])
def test_errors_of_whole_models_are_those_of_the_kernels(name: str) -> None:
    (case,) = (c for c in zoo.cases() if c.name == name)
    reference = steps(case, case.make(), 5)
    found = {}
    for emulation in ("native", "float32"):
        model = amp_graph.convert(case.make(), policy=Policy("bfloat16", emulation=emulation))
        with MatmulCounter() as products:
            found[emulation] = errors(reference, steps(case, model, 5))
        assert not any(plan.fallback for plan in amp_graph.plans(model))
        if emulation == "float32":
            assert products.low_share == 0
    for what in ("outputs", "gradient"):
        assert found["float32"].typical(what) <= 1.2 * found["native"].typical(what)


def bytes_kept(model: nn.Module, x: Tensor) -> int:
    """Of what a forward pass keeps for backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    model(x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in own)


def test_operands_are_kept_in_low_precision() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())

    x = torch.randn(4, 3, 12, 12)
    kept = [bytes_kept(converted(net, emulation), x) for emulation in ("native", "float32")]
    biases = 2 * 8 * 2
    assert kept[1] == kept[0] + biases  # which exist in low precision anyway


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(8, 4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Dropped(nn.Module):
    """Attention with dropout, which is not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x)[None, None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[0, 0]


@pytest.mark.parametrize("make", [Checkpointed, Dropped])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_is_near_the_kernels(make: Callable[[], nn.Module], dtype: str) -> None:
    found = []
    for emulation in ("native", "float32"):
        model = converted(make, emulation, dtype)
        torch.manual_seed(1)
        loss = model(X).square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_a_gradient_penalty() -> None:
    found = []
    for emulation in ("native", "float32"):
        model, x = converted(Mlp, emulation), X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)


def test_on_a_cpu_with_kernels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cpu", "calls.first_report", "backend.emulation"):
        monkeypatch.setattr(f"amp_graph.{module}.emulates", lambda dtype: False)
    model = converted(Mlp, "float32")
    with MatmulCounter() as products:
        model(X).sum().backward()
    assert products.low_share == 1


def test_the_first_call_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    converted(Mlp, "float32")(X)
    assert not [w for w in recwarn if w.category is amp_graph.ConversionWarning]


def test_reports_of_errors_emulate_too() -> None:
    model, policy = Mlp(), Policy("float16", emulation="float32")
    with MatmulCounter() as products:
        found = amp_graph.compare(copy.deepcopy(model), X, policy=policy)
    assert products.low_share == 0
    native = amp_graph.compare(model, X, policy="float16")
    assert found.loss == pytest.approx(native.loss, rel=1e-2)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(PolicyError, match="emulation must be 'native' or 'float32', not 'fast'"):
        Policy(emulation="fast")
    with pytest.raises(PolicyError, match="emulation='float32' is for compiler='eager'"):
        Policy(emulation="float32", compiler="inductor")


class CastsByItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.first(x).relu()
        return self.second(h.float())


@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_what_a_model_s_own_autocast_casts_is_left_to_it() -> None:
    model = converted(CastsByItself, "float32")
    with MatmulCounter() as products:
        assert model(X).dtype is torch.float32
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.low == {"linear_1"}
    assert 0 < products.low_share < 1
