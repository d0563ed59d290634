"""Captures are kept for models that are alike: so many of them, and no tensor of a model."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable

import pytest
from alike_models import Branching, Net, captured, step
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import amp_graph
from amp_graph.calls import capture_cache

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("kind", [Net, Branching, lambda: weight_norm(nn.Linear(8, 8))])
def test_no_tensor_of_a_model_that_is_gone_is_kept(kind: Callable[[], nn.Module]) -> None:
    model = amp_graph.convert(kind(), policy="bfloat16")
    step(model)
    kept = [weakref.ref(t) for t in (*model.parameters(), *model.buffers())]
    del model
    classes = getattr(inspect, "_shadowed_dict_from_mro_tuple", None)
    if classes is not None:  # Python 3.12.1 keeps the classes of parametrized layers
        classes.cache_clear()
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)


def test_not_more_are_kept_than_so_many() -> None:
    for slope in range(capture_cache.SIZE + 2):
        step(amp_graph.convert(Net(slope / 10 + 0.01), policy="bfloat16"))
    assert len(capture_cache._cache) == capture_cache.SIZE
    last = amp_graph.convert(Net(slope / 10 + 0.01), policy="bfloat16")
    assert captured(lambda: step(last)) == 0
