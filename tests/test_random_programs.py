"""Random programs give the same results after the pass, within the precision's tolerance.

Rewriting includes verifying, and raises where that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from graphs import BFLOAT16, FLOAT16, rewritten
from hypothesis import HealthCheck, given, settings
from programs import GROUPS_FOR_DYNAMO, Program, gradients, make_inputs, programs
from torch import Tensor, nn

import amp_graph
from amp_graph.capture.retrace import trace
from amp_graph.policy import Policy

SETTINGS = settings(
    derandomize=True,  # the same programs at every run, so that a failure is due to a change
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def run(function: Callable[..., Sequence[Tensor]], program: Program):
    """Inputs after the call, outputs, and gradients of the inputs."""
    inputs = make_inputs(program)
    outputs = function(*inputs)
    return inputs, outputs, gradients(inputs, outputs)


def sharing(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[list[bool]]:
    keys = [t.untyped_storage()._cdata for t in (*inputs, *outputs)]
    return [[a == b for b in keys] for a in keys[len(inputs) :]]


def assert_as_close(ours: Tensor, exact: Tensor, rounded: Tensor, eps: float, what: str) -> None:
    """As close to the exact result as one where every number on the way was rounded."""
    assert ours.dtype == exact.dtype, what
    assert ours.shape == exact.shape, what
    if not ours.is_floating_point():
        assert torch.equal(ours, exact), what
        return
    if not ours.numel():
        return
    ours, exact, rounded = (t.detach().double() for t in (ours, exact, rounded))
    scale = max(1.0, float(exact.abs().max()))
    allowed = 8 * float((rounded - exact).abs().max()) + 8 * eps * scale
    error = float((ours - exact).abs().max())
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def check(program: Program, policy: Policy) -> None:
    result = rewritten(trace(program, make_inputs(program)), policy)
    assert_agrees(program, policy, result.module)


def assert_agrees(
    program: Program, policy: Policy, converted: Callable[..., Sequence[Tensor]]
) -> None:
    inputs, outputs, grads = run(program, program)
    our_inputs, our_outputs, our_grads = run(converted, program)
    low_inputs, low_outputs, low_grads = run(program.rounded(policy.dtype), program)
    eps = torch.finfo(policy.dtype).eps

    assert sharing(our_inputs, our_outputs) == sharing(inputs, outputs)
    for i, original in enumerate(make_inputs(program)):
        if torch.equal(original, inputs[i]):
            assert torch.equal(our_inputs[i], original), f"input {i} was written to"
        assert_as_close(our_inputs[i], inputs[i], low_inputs[i], eps, f"input {i}")
    for i, triple in enumerate(zip(our_outputs, outputs, low_outputs, strict=True)):
        assert_as_close(*triple, eps, f"output {i}")
    for i, (ours, exact, low) in enumerate(zip(our_grads, grads, low_grads, strict=True)):
        assert (ours is None) == (exact is None), f"gradient {i}"
        if ours is not None and not program.has_kinks and not program.writes_unseen:
            assert_as_close(ours, exact, low, 2 * eps, f"gradient {i}")


@settings(SETTINGS, max_examples=200)
@given(programs())
def test_random_programs_in_bfloat16(program):
    check(program, BFLOAT16)


@settings(SETTINGS, max_examples=60)
@given(programs())
def test_random_programs_in_float16(program):
    check(program, FLOAT16)


class Model(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.program(*inputs)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@settings(SETTINGS, max_examples=80)
@given(programs(GROUPS_FOR_DYNAMO))
def test_random_programs_captured_by_dynamo(program):
    torch._dynamo.reset()
    model = amp_graph.convert(Model(program), policy=BFLOAT16)
    assert_agrees(program, BFLOAT16, model)
    assert not any("VerifyError" in str(plan.fallback) for plan in amp_graph.plans(model))
