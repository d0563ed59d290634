"""Under AMP_GRAPH_ENABLE=1 a resumed run goes on from the loss scale that it had saved."""

import copy

import pytest
import torch
from torch import nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_other_scales")


@pytest.mark.parametrize("is_built", [False, True], ids=["before the first call", "after it"])
def test_an_optimizer_that_nobody_gave_goes_on_from_the_scale_it_loads(start, is_built):
    """As in a script that does not know of us, in which some first steps were skipped."""
    start(DTYPE="float16")
    x = torch.randn(32, 8)

    def made():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def trained(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)) * 100
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    first = made()
    trained(*first, 12)
    saved = copy.deepcopy([each.state_dict() for each in first])
    assert amp_graph.step_counts(first[1]).skipped > 0 and "amp_graph" in saved[1]
    expected = trained(*first, 6)
    resumed = made()
    if is_built:
        resumed[0](x)
    for each, state in zip(resumed, saved, strict=True):
        each.load_state_dict(state)
    assert trained(*resumed, 6) == expected
    assert amp_graph.step_counts(resumed[1]) == amp_graph.step_counts(first[1])
    assert amp_graph.scale_of(resumed[0]).state_dict() == amp_graph.scale_of(first[0]).state_dict()


def test_what_is_patched_is_put_back(start):
    original = torch.optim.Optimizer.load_state_dict
    installation = start()
    assert torch.optim.Optimizer.load_state_dict is not original
    installation.undo()
    assert torch.optim.Optimizer.load_state_dict is original
