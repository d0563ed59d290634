"""Programs that are made of a converted model are its own code, in its own precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from nets import Net, low_share
from torch.fx.experimental.proxy_tensor import make_fx

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_traced_program_is_the_model_s_own() -> None:
    plain = Net().eval()
    model = amp_graph.convert(copy.deepcopy(plain))
    x = torch.randn(4, 8)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)  # it compares
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), plain(x))
    assert not hasattr(torch.jit._trace._check_trace, "of_plain_code")
    assert low_share(model, x) == 1


PROGRAMS = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "dynamic export": lambda model, x: torch.export.export(
        model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},)
    ).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "make_fx": lambda model, x: make_fx(lambda x: model(x))(x),
}


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("records", [False, True])
def test_an_exported_program_is_the_model_s_own(kind: str, was_called: bool, records: bool) -> None:
    plain = Net().eval()
    model = amp_graph.convert(copy.deepcopy(plain))
    x = torch.randn(4, 8)
    if was_called:
        model(x)
    with torch.set_grad_enabled(records):
        programs = [PROGRAMS[kind](model, x) for _ in range(2)]
    assert all(torch.equal(program(x), plain(x)) for program in programs)
    assert low_share(model, x) == 1
    assert not any(plan.fallback for plan in amp_graph.plans(model))
