"""What a model returns and goes on with is what the rest is made from, for whoever asks.

The reference is the float32 model; before these, such a gradient was an error, or lacked what came
through the rest of the graph.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import Names
from graphs import capture, rewritten
from torch import Tensor, nn
from torch.nn import functional as F

import amp_graph
from amp_graph.passes.early_results import let_leave_early
from amp_graph.passes.lift_results import lift_results

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
POLICIES = {
    "bfloat16": amp_graph.Policy("bfloat16"),
    "scaled": amp_graph.Policy("bfloat16", loss_scale=amp_graph.LossScale(2.0**10)),
    "float16": amp_graph.Policy("float16", loss_scale=amp_graph.LossScale(2.0**10)),
}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Net(nn.Module):
    """Returns features, and logits that are made from them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.between = between

    def features(self, x: Tensor) -> Tensor:
        return self.between(self.body(x))

    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        return features, self.head(features)


class Twice(Net):
    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        return features, self.head(features), features


class InFloat32(Net):
    """They are needed in float32, too."""

    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        return features, self.head(features) + features.exp().sum(-1, keepdim=True)


class InFloat32Alone(Net):
    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        return features, self.head(features.exp())


class InTwoSteps(Net):
    """Of what has left, more leaves that is made from it."""

    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        hidden = torch.tanh(features @ self.body.weight)
        return features, self.head(hidden), hidden


class OfViews(Net):
    """As keys and values that attention returns for a cache. Under a loss scale they cross
    together, at the end of the graph (docs/limits.md)."""

    def forward(self, x: Tensor) -> Any:
        one, other = self.features(x).chunk(2, dim=-1)
        return one, self.head(torch.cat([one * other, other], dim=-1)), other


MODELS = {
    "low": Net,
    "float32": lambda: Net(lambda x: x.exp()),
    "softmax": lambda: Net(lambda x: x.softmax(-1)),
    "twice": Twice,
    "read in both": InFloat32,
    "read in float32": InFloat32Alone,
    "two": InTwoSteps,
    "in place": lambda: Net(F.relu_),
}
CASES = [(kind, policy) for kind in MODELS for policy in POLICIES]
MODELS["views"] = OfViews
CASES.append(("views", "bfloat16"))


def by_grad(features: Tensor, logits: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(logits.square().sum(), features)]


def by_retaining(features: Tensor, logits: Tensor) -> list[Tensor]:
    features.retain_grad()
    (logits.square().sum() + 0.5 * features.sum()).backward()
    assert features.grad is not None
    return [features.grad]


def by_hook(features: Tensor, logits: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    features.register_hook(found.append)
    (logits.square().sum() + 0.5 * features.sum()).backward()
    return found


def by_changing_hook(features: Tensor, logits: Tensor) -> list[Tensor]:
    features.register_hook(lambda g: -2 * g)
    logits.square().sum().backward()
    return []


def by_penalty(features: Tensor, logits: Tensor) -> list[Tensor]:
    (slope,) = torch.autograd.grad(logits.square().sum(), features, create_graph=True)
    slope.square().sum().backward()
    return [slope.detach()]


def by_some_inputs(features: Tensor, logits: Tensor) -> list[Tensor]:
    logits.square().sum().backward(inputs=[features])
    assert features.grad is not None
    return [features.grad]


def by_nobody(features: Tensor, logits: Tensor) -> list[Tensor]:
    (logits.square().sum() + 0.5 * features.sum()).backward()
    return []


WAYS = (*(by_grad, by_retaining, by_hook, by_changing_hook, by_penalty, by_some_inputs, by_nobody),)


@pytest.mark.parametrize(("kind", "policy"), CASES, ids=lambda value: value)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_of_the_plain_model(
    policy: str, kind: str, way: Callable[[Tensor, Tensor], list[Tensor]]
) -> None:
    torch.manual_seed(0)
    plain = MODELS[kind]()
    model = amp_graph.convert(copy.deepcopy(plain), policy=POLICIES[policy])
    found = []
    for each in (plain, model):
        features, logits, *_ = each(X)
        assert features.dtype is torch.float32
        seen = way(features, logits)
        grads = [p.grad for p in each.parameters()]
        found.append([g for g in (*seen, *grads) if g is not None])
    within = 0.05 if POLICIES[policy].dtype is torch.bfloat16 else 0.01
    assert len(found[0]) == len(found[1])
    for expected, got in zip(*found, strict=True):
        assert (got - expected).norm() <= within * expected.norm()


@by_policy
@pytest.mark.parametrize("kind", ["low", "float32", "softmax", "twice", "read in float32", "two"])
def test_it_costs_nothing_where_nobody_looks(policy: amp_graph.Policy, kind: str) -> None:
    """But an alias, and a piece of autograd."""
    counts = []
    for is_early in (False, True):
        torch.manual_seed(0)
        model = amp_graph.convert(MODELS[kind](), policy=policy)
        with pytest.MonkeyPatch.context() as patch:
            if not is_early:
                patch.setattr(
                    "amp_graph.backend.build.let_leave_early", lambda graph, wide: (graph, wide, {})
                )
            torch._dynamo.reset()
            model(X)
        with Names() as ran:
            features, logits, *_ = model(X)
            (logits.square().sum() + features.sum()).backward()
        counts.append(sorted(name for name in ran.names if name != "detach"))
    assert counts[0] == counts[1]


def test_without_gradients_nothing_leaves_early() -> None:
    plain = Net()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            features, logits = model(X)
        assert features.dtype is logits.dtype is torch.float32
        assert not features.requires_grad
        torch.testing.assert_close(features, plain.features(X).detach(), rtol=0.05, atol=0.05)


def test_what_has_left_may_be_written_to() -> None:
    """As what leaves a plain model: where a gradient needs the value, autograd objects."""
    for policy in ("bfloat16", POLICIES["float16"]):
        model = amp_graph.convert(Net(), policy=policy)
        features, logits = model(X)
        before = logits.detach().clone()
        features.detach().mul_(0)
        assert torch.equal(logits.detach(), before)


def early(function: Callable[..., Any], *args: Any) -> dict[int, int]:
    lifted, widened = lift_results(rewritten(capture(function, *args)).module)
    return let_leave_early(lifted, widened)[2]


W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))


def test_which_results_leave_early() -> None:
    def last(x: Tensor, w: Tensor) -> Any:
        return (x @ w,)

    def read_on(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return y, y @ w, y

    def written_to(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        z = y @ w
        F.relu_(y)
        return y, z

    def written_to_before(x: Tensor, w: Tensor) -> Any:
        y = F.relu_(x @ w)
        return y, y @ w

    def read_on_in_part(x: Tensor, w: Tensor) -> Any:
        y = (x @ w).exp()
        return y, y[0], y @ w

    def an_input(x: Tensor, w: Tensor) -> Any:
        return x, x @ w

    def unrecorded(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            y = x @ w
        return y, y @ w

    assert early(last, X, W) == {}
    assert early(read_on, X, W) == {0: 0, 2: 0}
    assert early(written_to, X, W) == {}
    assert early(written_to_before, X, W) == {0: 0}
    assert early(read_on_in_part, X, W) == {}
    assert early(an_input, X, W) == {}
    with warnings.catch_warnings():
        assert early(unrecorded, X, W) == {}
