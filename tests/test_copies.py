"""Copies of a converted model: what is pickled is plain, what is copied deeply is converted."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from nets import Net, low_share

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("save", ["pickle", "torch.save"])
def test_pickle_carries_the_plain_model(save: str) -> None:
    model, x = amp_graph.convert(Net().eval()), torch.randn(4, 8)
    model(x)
    if save == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
    assert not amp_graph.is_converted(loaded)
    assert torch.equal(loaded(x), amp_graph.restore(model)(x))
    again = amp_graph.convert(copy.deepcopy(loaded))
    assert low_share(again, x) == 1
