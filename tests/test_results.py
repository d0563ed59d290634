"""What a model returns keeps its form when its tensors get another dtype."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import amp_graph
from amp_graph.results import map_tensors

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Node:
    value: Any
    parent: Any = None
    children: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Values:
    """As an object that a network of reinforcement learning returns."""

    def __init__(self, values: Any, told: Any = lambda values: values) -> None:
        self.values, self.told = values, told


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Options(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Uncopied(Values):
    def __copy__(self) -> Any:
        raise TypeError("there is one")


def low(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor


def family(value: Any, child: Any) -> Node:
    root = Node(value)
    root.children.append(Node(child, root))
    return root


class Tree(nn.Module):
    def __init__(self, grow: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.grow = nn.Linear(4, 4), grow

    def forward(self, x: Tensor) -> Any:
        return self.grow(self.layer(x))


def held_by_itself(y: Tensor) -> list[Any]:
    result = [y]
    result.append(result)
    return result


RESULTS = {
    "a family": (lambda y: family(y, y + 1), lambda r: [r.value, r.children[0].parent.value]),
    "a list": (held_by_itself, lambda r: [r[0], r[1][1][0]]),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("grow", "reach"), RESULTS.values(), ids=RESULTS.keys())
def test_a_model_may_return_what_refers_to_itself(grow: Any, reach: Any) -> None:
    policy, x = amp_graph.Policy("bfloat16", output_dtype="bfloat16"), torch.randn(2, 4)
    model, found = amp_graph.convert(Tree(grow), policy=policy), []
    torch.vmap(lambda x: found.append(model(x)) or x)(x)  # under autocast
    for result in (found[0], model(x)):
        first, again = reach(result)
        assert first is again and first.dtype is torch.bfloat16


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_output_dtype_is_for_float32_alone() -> None:
    class Scores(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            scores = super().forward(x)
            return scores, scores.argmax(-1), scores.double()

    policy = amp_graph.Policy("bfloat16", output_dtype="bfloat16")
    results = amp_graph.convert(Scores(4, 4), policy=policy)(torch.randn(2, 4))
    assert [r.dtype for r in results] == [torch.bfloat16, torch.int64, torch.float64]


def test_copies_lead_to_each_other_as_before() -> None:
    root = family(torch.ones(2), "a leaf")
    result = map_tensors(low, root)
    assert result is not root and result.children[0] is not root.children[0]
    assert result.children[0].parent is result and result.value.dtype is torch.bfloat16
    assert root.children[0].parent is root and root.value.dtype is torch.float32


@pytest.mark.parametrize("kind", [list, deque])
def test_a_tuple_in_a_list_in_itself(kind: type) -> None:
    inside: Any = kind([torch.ones(2)])
    inside.append((inside, 1))
    result = map_tensors(low, (inside, 1))
    assert type(result[0]) is kind and result[0][1][0] is result[0]
    result = map_tensors(low, inside[1])
    assert result[0][1] is result and result[0][0].dtype is torch.bfloat16


def test_what_leads_to_no_tensor_that_changed_stays() -> None:
    number = torch.ones(2, dtype=torch.int64)
    circle: dict[str, Any] = {"root": family(number, number)}
    circle["circle"] = circle
    for unchanged in (circle, Frozen(number), [1, "a"], Node, None):
        assert map_tensors(low, unchanged) is unchanged
    result = map_tensors(low, [circle, torch.ones(2)])
    assert result[0] is circle and result[1].dtype is torch.bfloat16


def test_containers_and_dataclasses_keep_their_kinds() -> None:
    x = torch.ones(2)
    for before in (
        {"a": [x]},
        OrderedDict(a=x),
        defaultdict(list, a=[x]),
        deque([x], maxlen=3),
        Pair(x, (1, Frozen([x]))),
        Frozen({"a": x}),
    ):
        after = map_tensors(low, before)
        assert type(after) is type(before)
        assert repr(after) == repr(map_tensors(torch.Tensor.bfloat16, before))
        assert "bfloat16" in repr(after) and "bfloat16" not in repr(before)
    assert map_tensors(low, defaultdict(list, a=x)).default_factory is list


def test_a_tensor_that_is_there_twice_stays_one() -> None:
    x, calls = torch.ones(2), []
    first, second = map_tensors(lambda t: calls.append(t) or t.bfloat16(), (x, [x]))
    assert first is second[0] and len(calls) == 1


def test_a_distribution_keeps_its_kind() -> None:
    mean, one = torch.zeros(2), torch.ones(2)
    normal = distributions.Normal(mean, one)
    given = distributions.TransformedDistribution(
        normal, [distributions.AffineTransform(mean, 2.0)]
    )
    found = map_tensors(low, distributions.Independent(given, 1))
    base = found.base_dist
    assert type(found) is distributions.Independent
    assert type(base) is distributions.TransformedDistribution
    assert base.base_dist.scale.dtype is torch.bfloat16 and normal.scale is one
    assert map_tensors(lambda t: t, normal) is normal


OBJECTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "attributes": (Values, lambda r: r.values),
    "inside of a list": (lambda y: [Values([y])], lambda r: r[0].values[0]),
    "slots": (Slotted, lambda r: r.value),
    "a dictionary of its own kind": (lambda y: Options(y=y), lambda r: r.y),
    "a namespace": (lambda y: SimpleNamespace(y=y), lambda r: r.y),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("make", "reach"), OBJECTS.values(), ids=OBJECTS.keys())
def test_objects_come_back_in_float32(make: Any, reach: Any) -> None:
    """From graphs and from the model's own code under autocast."""
    model, x = amp_graph.convert(Tree(make), policy="bfloat16"), torch.randn(2, 4)
    found: list[Any] = []
    torch.vmap(lambda x: found.append(model(x)) or x)(x)  # under autocast
    for result in (found[0], model(x), model(x)):
        assert type(result) is type(make(x))
        assert reach(result).dtype is torch.float32


def test_objects_are_copied_and_what_cannot_be_stays() -> None:
    x = torch.ones(2)
    before = Values([x, Options(x=x)], low)
    after = map_tensors(low, before)
    assert after.told is low
    assert after.values[0] is after.values[1].x and after.values[0].dtype is torch.bfloat16
    assert before.values[0] is x is before.values[1].x
    for unchanged in (Uncopied(x), nn.Linear(2, 2), partial(low, x), Values):
        assert map_tensors(low, unchanged) is unchanged


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_object_with_a_default_function_is_captured() -> None:
    model = amp_graph.convert(Tree(Values), policy="bfloat16")
    for rows in (2, 3, 4):
        result = model(torch.randn(rows, 4))
        assert result.told(3) == 3 and result.told is Values(0).told
    assert all(plan.low for plan in amp_graph.plans(model))
