"""Lists that a model only appends to are not read: it is captured once, however long they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from growing import Net, call, pair
from torch import Tensor

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FIGURE = "{:.1f} in the mean"


def two(net: Net, h: Tensor) -> None:
    net.kept.append(h.mean())
    net.kept.append(net.calls)


def by_name(net: Net, h: Tensor) -> None:
    net.by_name["body"].append(h.detach().max().item())


def in_turn(net: Net, h: Tensor) -> None:
    for values in (net.kept, net.last, net.kept):
        values.append(h.sum())


def asked(net: Net, h: Tensor) -> None:
    if net.kept is not None and hasattr(net, "kept") and isinstance(net.kept, list):
        net.kept.append(h.mean())
    if not (isinstance(net.last, list | tuple) or None is net.last):
        net.last.append(h.sum())


def a_list_of_lists(net: Net, h: Tensor) -> None:
    part = [h.mean()]
    net.kept.append(part)
    part.append(h.sum())


def added(net: Net, h: Tensor) -> None:
    net.kept += [h.mean(), net.calls]
    net.last += (h.sum(),)
    net.kept += [h.std().item()]


def added_by_name(net: Net, h: Tensor) -> None:
    net.by_name["body"] += [h.mean().item()]
    kept = net.kept
    kept += [h.sum()]
    net.lists[1] += [h.std()]


def by_number(net: Net, h: Tensor) -> None:
    net.by_number[net.calls] = h.mean().item()
    net.numbered[net.calls] = (h.sum(), h.shape)
    net.numbered[0] = net.held


ALONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "a number": lambda net, h: net.kept.append(h.mean().item()),
    "a tensor": lambda net, h: net.kept.append(h.detach()),
    "what is held": lambda net, h: net.kept.append(net.held),
    "a parameter": lambda net, h: net.kept.append(net.body.bias),
    "the last three": lambda net, h: net.last.append(h.detach().mean()),
    "two": two,
    "by name": by_name,
    "in turn": in_turn,
    "asked for": asked,
    "a pair": lambda net, h: net.kept.append((h.mean(), h.std().item(), net.calls)),
    "a dictionary": lambda net, h: net.kept.append({"mean": h.mean(), "shape": h.shape}),
    "text": lambda net, h: net.kept.append(FIGURE.format(h.mean().item())),
    "several": lambda net, h: net.kept.extend([h.mean(), h.sum()]),
    "a list of lists": a_list_of_lists,
    "added": added,
    "added by name": added_by_name,
    "by number": by_number,
}


@pytest.mark.parametrize("use", ALONE.values(), ids=ALONE.keys())
def test_it_is_captured_for_all_lengths(use: Callable[[Any, Tensor], Any]) -> None:
    plain, model = pair(use)
    call(plain, model, 3)
    captured = len(amp_graph.plans(model))
    call(plain, model, 6)
    assert len(amp_graph.plans(model)) == captured
    assert not record_of(model).breaks


def test_it_is_also_where_the_item_ends_a_graph() -> None:
    plain, model = pair(lambda net, h: net.kept.append((time.perf_counter() > 0, h.mean())))
    call(plain, model, 3)
    captured = len(amp_graph.plans(model))
    call(plain, model, 6)
    assert len(amp_graph.plans(model)) == captured


def test_another_thing_in_its_place_is_captured_anew() -> None:
    plain, model = pair(two)
    call(plain, model, 2)
    for net in (plain, model):
        net.kept = deque[Any]()
    call(plain, model, 2)
