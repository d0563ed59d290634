"""Models with parts that are TorchScript, which Dynamo does not capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class PartlyScripted(nn.Module):
    """Dynamo gives its `forward` up as a whole, or after the first layer."""

    def __init__(self, breaks: bool = False):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)))
        self.breaks = breaks

    def forward(self, x):
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.scripted(h)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "after a break"])
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_they_train(breaks):
    plain = PartlyScripted(breaks)
    model = PartlyScripted(breaks)
    model.load_state_dict(plain.state_dict())
    amp_graph.convert(model, policy="bfloat16")
    for _ in range(3):
        expected, found = plain(X), model(X)
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
        expected.sum().backward()
        found.sum().backward()
    gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.1)


def test_where_nothing_is_captured_a_warning_says_why():
    model = amp_graph.convert(PartlyScripted(), policy="bfloat16")
    with pytest.warns(amp_graph.ConversionWarning, match="nothing is captured"):
        model(X)


@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
@pytest.mark.parametrize(
    "look",
    [
        lambda model: amp_graph.compare(model, X, policy="bfloat16"),
        lambda model: amp_graph.find_nonfinite(model, X, policy="bfloat16"),
        lambda model: amp_graph.calibrate(model, [X], 0.1, policy="bfloat16"),
    ],
    ids=["compare", "find_nonfinite", "calibrate"],
)
def test_to_look_at_one_leaves_it_as_it_was(look):
    model = PartlyScripted(breaks=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert before.keys() >= {"scripted.0.running_mean", "scripted.0.num_batches_tracked"}
    look(model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
