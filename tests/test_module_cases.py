"""Every module of torch.nn, called as PyTorch's own tests call it, behind a layer of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

import amp_graph

# Ten roundings to bfloat16's 8 bits, each of 2^-9 at most; of what is up to 9, the exponential has
# nine times the relative error.
NEAR = 0.05
# Code that branches on values ends a graph: on whether a variance is negative.
BREAKS = {"GaussianNLLLoss"}
MODES = [(info, True) for info in module_db]
MODES += [(info, False) for info in module_db if info.train_and_eval_differ]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Behind(nn.Module):
    """A module whose first argument has passed a layer, which keeps its sign and makes it no
    larger: some losses take probabilities alone, or their logarithms."""

    def __init__(self, inner: nn.Module, width: int):
        super().__init__()
        self.layer, self.inner = nn.Linear(width, width), inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self.inner(self.gated(args[0]), *args[1:], **kwargs)
        name, first = next(iter(kwargs.items()))
        return self.inner(**{**kwargs, name: self.gated(first)})

    def gated(self, x: Tensor) -> Tensor:
        return x * self.layer(x).sigmoid() if x.is_floating_point() else x


def first_of(sample: Any) -> Any:
    """The first argument that a sample's module is called with."""
    return (*sample.forward_input.args, *sample.forward_input.kwargs.values())[0]


def made(info: Any, training: bool) -> tuple[nn.Module, tuple[Any, Any]]:
    """A module of the first sample with a dimension, and the arguments of its call."""
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    sample = next(each for each in samples if first_of(each).ndim)
    given = sample.constructor_input
    # Numbers drawn before, in float64 there.
    kwargs = tree_map_only(Tensor, Tensor.float, given.kwargs)
    inner, call = info.module_cls(*given.args, **kwargs), sample.forward_input
    args, kwargs = tuple(call.args), dict(call.kwargs)
    if info.is_lazy:
        inner(*args, **kwargs)
    return Behind(inner, first_of(sample).shape[-1]).train(training), (args, kwargs)


def results(model: nn.Module, given: Any) -> tuple[Any, list[Tensor]]:
    """The output of a call, and the gradients that come of it, of inputs and of parameters."""
    copied = tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), given
    )
    torch.manual_seed(0)  # the same elements are dropped
    args, kwargs = copied
    out = model(*args, **kwargs)
    torch.manual_seed(1)
    leaves = [t for t in tree_leaves(out) if t.requires_grad]
    torch.autograd.backward(leaves, [torch.randn_like(t) for t in leaves])
    inputs = [t for t in tree_leaves(copied) if isinstance(t, Tensor)]
    return out, [t.grad for t in (*inputs, *model.parameters()) if t.grad is not None]


def error(values: list[Tensor], references: list[Tensor]) -> float:
    """Relative, of all together: some are given what a loss or a root is NaN of."""
    pairs = [(a.nan_to_num(), b.nan_to_num()) for a, b in zip(values, references, strict=True)]
    assert all(map(torch.equal, map(torch.isnan, values), map(torch.isnan, references)))
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([b.norm() for _, b in pairs]).norm().clamp_min(1e-9))


@pytest.mark.parametrize(
    ("info", "training"),
    MODES,
    ids=[f"{info.formatted_name} {'train' if training else 'eval'}" for info, training in MODES],
)
def test_a_converted_module_does_what_it_does_in_float32(info: Any, training: bool) -> None:
    plain, given = made(info, training)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    (out, gradients), (expected, references) = results(model, given), results(plain, given)
    (found, structure), (leaves, reference) = tree_flatten(out), tree_flatten(expected)
    assert structure == reference
    assert error([t.detach() for t in found], [t.detach() for t in leaves]) <= NEAR
    for a, b in zip((*found, *gradients), (*leaves, *references), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert [t.stride() for t in found] == [t.stride() for t in leaves]
    assert error(gradients, references) <= NEAR
    assert model.state_dict().keys() == plain.state_dict().keys()
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert a.dtype is b.dtype and torch.allclose(a, b, rtol=NEAR, atol=NEAR)
    plans = amp_graph.plans(model)
    assert all(plan.fallback is None and not plan.autocast for plan in plans)
    assert len(plans) == 1 or info.module_cls.__name__ in BREAKS
