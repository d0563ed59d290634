"""Which models of a script are left alone, and what is said of them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from nets import Net
from test_first_call import Container, X, decided, net
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import amp_graph
from amp_graph.autopatch.summary import summary_of
from amp_graph.scaling.explicit_scalers import is_grad_scaler_around


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, torch.qint8)


def with_quantised_part() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *quantised())


def held_otherwise() -> nn.Module:
    """As quantising packages hold weights; torch's example of such a tensor."""
    model = nn.Linear(8, 3)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach()))
    return model


class Decorated(nn.Linear):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def prepared() -> nn.Module:
    """As Trainer(bf16=True) has it done."""
    return Accelerator(cpu=True, mixed_precision="bf16").prepare(net())


LEFT_ALONE = {
    "half": (lambda: net().to(torch.bfloat16), "its parameters are bfloat16"),
    "double": (lambda: net().double(), "its parameters are float64"),
    "mixed": (
        lambda: nn.Sequential(nn.Linear(8, 8), Container(net()), nn.Linear(8, 3).double()),
        "its parameters are float32, float64",
    ),
    "meta": (lambda: net().to("meta"), "its parameters are on the meta device"),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 3)), "it is scripted"),
    "partly quantised": (with_quantised_part, "it is quantised"),
    "held otherwise": (held_otherwise, "its parameters are held as TwoTensor"),
    "decorated": (lambda: Decorated(8, 3), "the script uses torch.autocast"),
    "prepared by accelerate": (prepared, "the script uses torch.autocast"),
    "compiled": (lambda: torch.compile(net(), backend="eager"), "the script uses torch.compile"),
    "converted": (lambda: amp_graph.convert(net()), "the script converts it itself"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_left_alone_is_said_once(start, capsys, kind):
    make, why = LEFT_ALONE[kind]
    model = make()
    installation = start()
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    x = X.to(parameter.device, parameter.dtype)
    for _ in range(2):
        if kind == "mixed":
            with pytest.raises(RuntimeError, match="dtype"):
                model(x)
        else:
            model(x)
    assert list(decided(installation).values()) == [why]
    assert capsys.readouterr().err.count("is left as it is") == 1


class Similarity(nn.Module):
    """With a temperature that NumPy made, as in the loss of OneFormer: a number in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(np.log(1 / 0.07)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.exp()


def test_a_single_number_in_float64_leaves_a_model_its_precision(start, capsys):
    installation, model = start(DTYPE="bfloat16"), Similarity()
    plain = copy.deepcopy(model)
    assert model.scale.dtype is torch.float64
    out, expected = model(X), plain(X)
    out.sum().backward(), expected.sum().backward()
    assert decided(installation) == {"Similarity": ""} and not capsys.readouterr().err
    assert amp_graph.plans(model)[0].has_low
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(model.scale.grad, plain.scale.grad, rtol=2e-2, atol=2e-1)


@pytest.mark.filterwarnings("ignore")
def test_a_wholly_quantised_model_has_nothing_to_convert(start):
    installation = start()
    quantised()(X)
    assert not installation.models.seen


class Sums(nn.Module):
    """With sums that could be quantised, as in torchvision's quantisable models, or are."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.sums = nn.Linear(8, 8), kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.sums, torch.ao.nn.quantized.QFunctional):
            return self.layer(x)
        return self.sums.add(self.layer(x), x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("FloatFunctional", None), ("FXFloatFunctional", None), ("QFunctional", "it is quantised")],
)
def test_sums_that_can_be_quantised_are_float(start, kind, said):
    installation, model = start(), Sums(getattr(torch.ao.nn.quantized, kind))
    model(X).sum().backward()
    assert amp_graph.is_converted(model) is (said is None)
    assert said is None or decided(installation) == {"Sums": said}


@pytest.mark.parametrize("way", ["autocast", "GradScaler"])
def test_precision_of_the_scripts_own_goes_first(start, way):
    installation, model = start(), net()
    scaler = torch.amp.GradScaler("cpu") if way == "GradScaler" else None
    with torch.autocast("cpu", enabled=scaler is None):
        out = model(X)
    assert out.dtype is (torch.float32 if scaler else torch.bfloat16)
    uses = "a GradScaler" if scaler else "torch.autocast"
    assert decided(installation) == {"Sequential": f"the script uses {uses}"}


def test_a_model_that_comes_under_autocast_later_is_left_to_it(start, capsys):
    installation, model = start(), net()
    plain = copy.deepcopy(model)
    model(X)
    assert amp_graph.is_converted(model)
    for _ in range(2):
        with torch.autocast("cpu"):
            assert torch.equal(model(X), plain(X))
    assert torch.equal(model(X), plain(X))
    assert not amp_graph.is_converted(model)
    assert decided(installation) == {"Sequential": "the script uses torch.autocast"}
    assert summary_of(installation.models.seen[0]).as_json()["converted"] is False
    said = capsys.readouterr().err
    assert said.count("left as it is from now on: the script uses torch.autocast") == 1


@pytest.mark.filterwarnings("ignore")
def test_a_copy_that_was_cast_is_left_alone(start, capsys):
    installation, model = start(), net()
    model(X)
    cast = copy.deepcopy(model).double()
    for _ in range(2):
        assert cast(X.double()).dtype is torch.float64
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(cast)
    assert [m.left_alone for m in installation.models.seen] == ["", "its parameters are float64"]
    told = "amp_graph: Sequential is left as it is: its parameters are float64"
    assert capsys.readouterr().err.splitlines() == [told]


def in_bfloat16(model):
    model.to(torch.bfloat16)(X.bfloat16())
    return model


def in_mixed_dtypes(model):
    model[0].double()
    with pytest.raises(RuntimeError):
        model(X)
    return model


def as_a_copy(model):
    model(X)
    copied = copy.deepcopy(model).double()
    copied(X.double())
    return copied


@pytest.mark.parametrize("way", [in_bfloat16, in_mixed_dtypes, as_a_copy])
def test_a_model_that_is_float32_at_last_is_converted_then(start, way):
    start()
    model = way(net())
    assert not amp_graph.is_converted(model)
    head = model[2].float()
    head(X)
    assert not amp_graph.is_converted(head)  # it is part of what is not
    model.float()(X)
    assert amp_graph.is_converted(model) and amp_graph.plans(model)[0].converts


def around(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [around, in_place, forward])
@pytest.mark.parametrize("make", [net, Net])
def test_what_is_compiled_around_a_converted_model_is_told_of(start, capsys, make, compiled):
    installation, model = start(), make()
    model(X)
    called = compiled(model)
    for _ in range(2):
        assert torch.equal(called(X), model(X))
    assert [m.left_alone for m in installation.models.seen] == [""]
    assert not installation.models.compiles
    assert installation.models.seen[0].record.runs.total() == 5
    told = f"{type(model).__name__} runs in mixed precision already; torch.compile around it"
    assert capsys.readouterr().err.splitlines() == [f"amp_graph: {told} does nothing"]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [around, in_place, forward])
@pytest.mark.parametrize("make", [net, Net])
def test_what_is_compiled_around_a_model_converted_by_hand_warns_once(make, compiled):
    model = amp_graph.convert(make(), policy="bfloat16")
    model(X)
    called = compiled(model)
    with pytest.warns(amp_graph.ConversionWarning, match="torch.compile around it does") as told:
        for _ in range(2):
            called(X)
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_compiles_more_than_a_converted_model_does_not_warn(recwarn):
    model = amp_graph.convert(net(), policy="bfloat16")
    torch.compile(lambda x: model(x).square(), backend="eager")(X)
    assert not recwarn.list


@pytest.mark.skipif(torch.cuda.is_available(), reason="no warning where there is CUDA")
def test_a_grad_scaler_warns_of_the_place_that_made_it() -> None:
    is_grad_scaler_around()  # from here on they are noted
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        scaler = torch.amp.GradScaler("cuda")
    assert [w.filename for w in caught] == [__file__]
    assert not is_grad_scaler_around()
    del scaler
    scaler = torch.amp.GradScaler("cpu")
    assert is_grad_scaler_around()
    del scaler
