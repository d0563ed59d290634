"""Copies of a converted model: what is pickled is plain, what is copied deeply is converted."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from nets import Net, low_share
from torch import nn

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


class ByDict(Net):
    """Enters itself in the memo too late, when all that it has was copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class MemoFirst(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


class ByAttribute(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self)()
        for name, value in self.__dict__.items():
            setattr(new, name, copy.deepcopy(value, memo))
        return new


class Anew(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self)()
        new.load_state_dict(self.state_dict())
        return new


class InItsState(Net):
    """In a state of its own form, which leads back to the model."""

    def __getstate__(self) -> Any:
        return {"inside": (vars(self), self)}

    def __setstate__(self, state: Any) -> None:
        inside, model = state["inside"]
        assert model is self
        vars(self).update(inside)


@pytest.mark.parametrize("kind", [Net, ByDict, MemoFirst, ByAttribute, Anew, InItsState])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_deep_copy_is_converted_however_its_class_copies(kind: type[Net], dtype: str) -> None:
    model, x = amp_graph.convert(kind(), policy=dtype), torch.randn(4, 8)
    expected = model(x)
    holder = copy.deepcopy({"first": model, "second": model})
    twin = holder["first"]
    assert twin is holder["second"] and type(twin) is kind
    assert amp_graph.is_converted(twin) and not amp_graph.plans(twin)
    assert (amp_graph.scale_of(twin) is None) is (dtype == "bfloat16")
    assert amp_graph.scale_of(twin) is not amp_graph.scale_of(model) or dtype == "bfloat16"
    assert torch.equal(twin(x), expected) and low_share(twin, x) == 1
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    assert not twin(x).any() and model(x).any(), "each runs on its own parameters"
    amp_graph.restore(twin)
    assert set(vars(twin)) == set(vars(Net())) and amp_graph.is_converted(model)


class Shared(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class Teacher(Net):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.others[0]


def test_a_model_whose_deep_copy_is_no_copy() -> None:
    shared = amp_graph.convert(Shared())
    teacher = amp_graph.convert(Teacher(shared), policy="float16")
    entries = dict(vars(shared))
    assert copy.deepcopy(shared) is shared and copy.deepcopy(teacher) is shared
    assert vars(shared) == entries


def test_a_copied_dict_of_a_model_is_of_a_copy() -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)
    clone = Net.__new__(Net)
    clone.__dict__.update(copy.deepcopy(model.__dict__))
    assert torch.equal(clone(x), model(x))
    nn.init.zeros_(clone.second.weight), nn.init.zeros_(clone.second.bias)
    assert not clone(x).any() and model(x).any()
