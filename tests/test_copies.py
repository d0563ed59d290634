"""Copies of a converted model: what is pickled is plain, what is copied deeply is converted."""

from __future__ import annotations

import copy
import io
import pickle
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from nets import Net, low_share
from torch import fx, nn

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class InItsState(Net):
    """In a state of its own form, which leads back to the model."""

    def __getstate__(self) -> Any:
        return {"inside": (vars(self), self)}

    def __setstate__(self, state: Any) -> None:
        inside, model = state["inside"]
        assert type(model) is type(self)
        vars(self).update(inside)


def rebuilt(attributes: dict[str, Any]) -> nn.Module:
    model = ByArguments.__new__(ByArguments)
    model.__dict__ = attributes
    return model


class ByArguments(Net):
    def __reduce__(self) -> Any:
        return rebuilt, (self.__dict__,)


class WithoutCache(Net):
    def __getstate__(self) -> Any:
        return {name: value for name, value in super().__getstate__().items() if name != "cache"}


def as_graph_module() -> nn.Module:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))


def by_pickle(model: nn.Module, protocol: int | None = None, dumps: Any = pickle.dumps) -> Any:
    data = dumps(model, protocol)
    assert b"amp_graph" not in data, "it loads where this package is not installed"
    return pickle.loads(data)


def by_python(model: nn.Module) -> Any:
    return by_pickle(model, dumps=pickle._dumps)  # type: ignore[attr-defined]


def by_forking(model: nn.Module) -> Any:
    """As `multiprocessing` hands a model to another process."""
    return pickle.loads(ForkingPickler.dumps(model))


def by_torch(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"amp_graph" not in buffer.getvalue()
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {
    "pickle": by_pickle,
    "pickle, 0": lambda model: by_pickle(model, 0),
    "pickle, 5": lambda model: by_pickle(model, 5),
    "pickle in Python": by_python,
    "torch.save": by_torch,
    "multiprocessing": by_forking,
    "copy.copy": copy.copy,
}
KINDS = [Net, InItsState, ByArguments, WithoutCache, as_graph_module]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("make", KINDS)
def test_what_is_pickled_or_copied_is_the_plain_model(make: Any, way: Any) -> None:
    plain = make().eval()
    model, x = amp_graph.convert(copy.deepcopy(plain)), torch.randn(4, 8)
    model(x)
    loaded = way(model)
    assert vars(loaded).keys() == vars(way(plain)).keys()
    assert torch.equal(loaded(x), plain(x))
    again = amp_graph.convert(copy.deepcopy(loaded))
    assert low_share(again, x) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_copies_of_what_was_loaded_run_on_their_own_parameters(way: Any) -> None:
    loaded, x = way(amp_graph.convert(Net())), torch.randn(4, 8)
    for copied in (copy.copy(loaded), loaded._replicate_for_data_parallel()):
        copied._modules = dict(copied._modules, second=nn.Linear(16, 2))
        assert copied(x).shape == (4, 2) and loaded(x).shape == (4, 4)


def test_a_converted_part_of_what_is_pickled() -> None:
    model = amp_graph.convert(Net())
    whole, part = by_pickle(["a list", nn.Sequential(model), model])[1:]
    assert whole[0] is part and not amp_graph.is_converted(part)
    assert vars(part).keys() == vars(Net()).keys()


def test_a_shallow_copy_shares_what_it_shares() -> None:
    model = amp_graph.convert(Net())
    model.names = ["a"]
    shallow = copy.copy(model)
    assert not amp_graph.is_converted(shallow) and amp_graph.is_converted(model)
    for name in ("_parameters", "_modules", "_buffers", "names"):
        assert getattr(shallow, name) is getattr(model, name)


class Beside(Net):
    """Has more in its state, some of which leads back to itself, than what is in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.ring = {"a": 1}, list[Any]()
        self.ring.append(self.ring)

    def __getstate__(self) -> Any:
        return {"all": vars(self), "settings": self.settings, "ring": self.ring}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state["all"], settings=state["settings"], ring=state["ring"])


def test_so_does_one_with_a_state_of_its_own() -> None:
    model = amp_graph.convert(Beside())
    shallow = copy.copy(model)
    assert not amp_graph.is_converted(shallow)
    assert shallow.settings is model.settings and shallow.ring is model.ring


def test_a_pickled_dict_of_a_model_is_of_the_plain_one() -> None:
    model, x = amp_graph.convert(Net().eval()), torch.randn(4, 8)
    clone = Net.__new__(Net)
    clone.__dict__.update(pickle.loads(pickle.dumps(vars(model))))
    assert torch.equal(clone(x), amp_graph.restore(model)(x))
    assert torch.equal(copy.deepcopy(clone)(x), model(x))


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


class AsByDefault(Net):
    """Steps aside for the default, and gives the copy a method of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        method = self.__deepcopy__
        self.__deepcopy__ = None
        new = copy.deepcopy(self, memo)
        self.__deepcopy__ = method
        new.__deepcopy__ = types.MethodType(method.__func__, new)
        return new


def test_a_deep_copy_by_the_method_of_a_bound_one() -> None:
    model, x = amp_graph.convert(AsByDefault()), torch.randn(4, 8)
    for twin in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        assert amp_graph.is_converted(twin) and torch.equal(twin(x), model(x))


class Shared(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class Teacher(Net):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.others[0]


class Named(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return "a name"


def test_a_model_whose_deep_copy_is_no_copy() -> None:
    shared = amp_graph.convert(Shared())
    teacher = amp_graph.convert(Teacher(shared), policy="float16")
    entries = dict(vars(shared))
    assert copy.deepcopy(shared) is shared and copy.deepcopy(teacher) is shared
    assert vars(shared) == entries
    assert copy.deepcopy(amp_graph.convert(Named())) == "a name"


def test_a_copied_dict_of_a_model_is_of_a_copy() -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)
    clone = Net.__new__(Net)
    clone.__dict__.update(copy.deepcopy(model.__dict__))
    assert torch.equal(clone(x), model(x))
    nn.init.zeros_(clone.second.weight), nn.init.zeros_(clone.second.bias)
    assert not clone(x).any() and model(x).any()
