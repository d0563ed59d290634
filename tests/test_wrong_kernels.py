"""Convolutions that CPUs get wrong in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from graphs import W, X, capture_module, rewritten, run
from torch import nn

import amp_graph
from amp_graph import Policy

ON_AMX = {  # channels, kernel, groups: what AMX gets wrong in bfloat16, and what it does not
    "grouped": (8, 16, 4, True),
    "letters of DNA": (4, 24, 1, True),
    "few": (12, 8, 1, True),
    "no multiple": (4, 20, 1, False),
    "short": (4, 8, 2, False),
    "odd": (3, 32, 1, False),
    "many": (16, 16, 1, False),
}


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("name", ON_AMX)
def test_a_convolution_that_amx_gets_wrong_stays_in_float32(name, dimensions, monkeypatch):
    """Whose results have nothing to do with the input there (torch 2.11 to 2.14)."""
    channels, width, groups, is_wrong = ON_AMX[name]
    make = nn.Conv1d if dimensions == 1 else nn.Conv2d
    kernel = (width,) if dimensions == 1 else (3, width)
    plain = make(channels * groups, 8, kernel, groups=groups)
    x = torch.randn(2, channels * groups, *(40,) * dimensions)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    assert (model(x) - plain(x)).norm() < 0.01 * plain(x).norm()  # on whichever CPU
    for has_amx in (True, False):
        monkeypatch.setattr("amp_graph.passes.wrong_kernels.has_amx", lambda has=has_amx: has)
        result = rewritten(capture_module(plain, x), Policy("bfloat16"))
        assert bool(result.plan.low) is not (is_wrong and has_amx)


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_is_convolved_with_itself(has_bias):
    def function(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        image = (x @ w)[:, None]
        return nn.functional.conv1d(image, image, bias if has_bias else None)

    args = X, W, W[0]
    result = run(function, *args, policy=Policy("bfloat16"))
    torch.testing.assert_close(result(*args), function(*args), rtol=0.02, atol=0.02)
    assert {f.op for f in result.plan.facts.values() if f.name in result.plan.low} > {
        "aten.matmul.default",
        "aten.conv1d.default",
    }


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("padding", [1, "same"])
def test_a_conv3d_deeper_than_its_input_stays_in_float32(padding):
    """The gradient of its weight in bfloat16 would be NaN (torch 2.13, AVX512-BF16)."""
    model = nn.Conv3d(16, 16, 3, padding=padding)
    for depth in (2, 1, 3):
        converted = amp_graph.convert(copy.deepcopy(model), policy="bfloat16")
        x = torch.randn(2, 16, depth, 4, 4)
        converted(x).square().sum().backward()
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(converted.weight.grad, model.weight.grad, rtol=0.1, atol=8.0)
        (plan,) = amp_graph.plans(converted)
        assert ("conv3d" in plan.low) is (depth != 2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_conv3d_of_inputs_of_several_depths_stays_in_float32():
    """One of which may be less than that of its kernel, though none was when it was captured."""
    plain = nn.Conv3d(16, 16, 3, padding=1)
    converted = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for depth in (4, 3, 2):
        x = torch.randn(2, 16, depth, 4, 4)
        for model in (plain, converted):
            model.zero_grad()
            model(x).square().sum().backward()
        torch.testing.assert_close(converted.weight.grad, plain.weight.grad, rtol=0.1, atol=8.0)
    first, second = amp_graph.plans(converted)
    assert first.low and not second.low
    flat = amp_graph.convert(nn.Conv3d(16, 16, (1, 3, 3)), policy="bfloat16")
    for depth in (4, 3, 2):
        flat(torch.randn(2, 16, depth, 4, 4))
    assert all("conv3d" in plan.low for plan in amp_graph.plans(flat))


STEPS = {  # a layer, the sizes of its input, and whether the kernel of its gradient is wrong
    "one pixel": (nn.Conv2d(64, 64, 3, 2, 1), (1, 1), True),
    "one column": (nn.Conv2d(64, 64, (1, 3), (1, 2), (0, 1)), (4, 1), True),
    "two columns": (nn.Conv2d(64, 64, 3, 3, 1), (4, 2), True),
    "one step": (nn.Conv1d(64, 64, 3, stride=2, padding=1), (1,), True),
    "one row of a volume": (nn.Conv3d(32, 32, (1, 3, 3), 2, (0, 1, 1)), (4, 1, 4), True),
    "one row": (nn.Conv2d(64, 64, 3, 2, 1), (1, 4), False),
    "stride 1": (nn.Conv2d(64, 64, 3, 1, 1), (1, 1), False),
    "kernel 1": (nn.Conv2d(64, 64, 1, 2), (1, 1), False),
    "wide enough": (nn.Conv2d(64, 64, 3, 2, 1), (2, 2), False),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", STEPS)
def test_a_convolution_whose_stride_is_larger_than_its_input_stays_in_float32(name):
    """As at the end of a ResNet for small images. The gradient of its weight in bfloat16 would be
    what was in memory (torch 2.13, AVX512-BF16)."""
    plain, sizes, is_wrong = STEPS[name]
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    x = torch.randn(8, plain.in_channels, *sizes)
    for net in (plain, model):
        net(x).square().mean().backward()
    difference = model.weight.grad - plain.weight.grad
    assert difference.norm() < 0.02 * plain.weight.grad.norm()
    (plan,) = amp_graph.plans(model)
    assert bool(plan.low) is not is_wrong
