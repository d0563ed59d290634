"""Captures are kept for models that are alike, and no tensor of a model with them."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable

import pytest
from alike_models import Branching, Net, step
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import amp_graph

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
