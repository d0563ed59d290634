"""A CPU without kernels for a low precision: a warning, and nothing that needs the kernels."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from training import Mlp

import amp_graph
from amp_graph import ConversionWarning, Policy, cpu

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The low precisions that the CPU has no kernels for; both, unless a test takes one out."""
    found = {torch.bfloat16, torch.float16}
    for module in ("cpu", "calls.first_report"):
        monkeypatch.setattr(f"amp_graph.{module}.emulates", found.__contains__)
    return found


def messages(model: nn.Module, calls: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(torch.ones(2, 4))
    found = [w for w in caught if w.category is ConversionWarning]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_first_call_warns(emulated: set[torch.dtype], dtype: str) -> None:
    (message,) = messages(amp_graph.convert(Mlp(), policy=dtype), calls=2)
    assert message.startswith("Mlp may be slower than in float32")
    assert (
        f"no kernels for products in {dtype}" in message
        and 'Policy(emulation="float32")' in message
    )


def test_it_is_said_once_in_a_process(emulated: set[torch.dtype]) -> None:
    models = [amp_graph.convert(Mlp(), policy="bfloat16") for _ in range(3)]
    assert [len(messages(model, calls=1)) for model in models] == [1, 0, 0]


def test_the_warning_names_a_precision_that_has_kernels(emulated: set[torch.dtype]) -> None:
    emulated.discard(torch.bfloat16)
    assert messages(amp_graph.convert(Mlp(), policy="bfloat16"), calls=1) == []
    (message,) = messages(amp_graph.convert(Mlp(), policy="float16"), calls=1)
    assert "It has kernels for bfloat16. With amp_graph.Policy(emulation=" in message


def test_a_compiled_model_is_told_of_what_it_may_have(
    emulated: set[torch.dtype], traced: None
) -> None:
    policy = Policy("float16", compiler="inductor", loss_scale=None)
    (message,) = messages(amp_graph.convert(Mlp(), policy=policy), calls=1)
    assert 'With compiler="eager" and emulation="float32"' in message
    Policy("float16", compiler="eager", emulation="float32")


def test_a_model_that_stays_in_float32_is_not_slower(emulated: set[torch.dtype]) -> None:
    (message,) = messages(amp_graph.convert(Mlp(), policy=Policy(keep_float32="*")), calls=1)
    assert "nothing of Mlp was converted" in message


def test_a_model_on_another_device_is_not_slower(emulated: set[torch.dtype]) -> None:
    model = amp_graph.convert(Mlp().to("meta"), policy="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4, device="meta"))


def test_what_is_no_low_precision_is_not_emulated() -> None:
    assert not cpu.emulates(torch.float32)
