"""Lists that a model appends to and also reads, replaces or hands out are what they would be."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from growing import Net, X, call, pair
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.convert import record_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def made_anew(net: Net, h: Tensor) -> None:
    net.kept.append(h.mean())
    net.kept = []
    net.kept.append(h.sum())


def handed_out(net: Net, h: Tensor) -> Any:
    net.kept.append(h.mean())
    return net.kept


def behind_a_break(net: Net, h: Tensor) -> None:
    net.kept.append(h.mean())
    print(end="")
    net.kept.append(h.sum())


def length(net: Net, h: Tensor) -> Any:
    net.kept.append(h.mean())
    return len(net.kept)


def through_another(net: Net, h: Tensor) -> Any:
    net.kept.append(h.mean())
    return net.alias[-1] * 2


def stacked(net: Net, h: Tensor) -> Any:
    net.kept.clear()
    for factor in (1, 2, 3):
        net.kept.append(h.mean() * factor)
    return torch.stack(net.kept)


def read_behind_a_break(net: Net, h: Tensor) -> Any:
    net.kept.append(h.mean())
    print(end="")
    return net.kept[-1] + 1


def of_many(net: Net, h: Tensor) -> Any:
    lists = [net.by_name[name] for name in "abcdefgh"]
    for values in lists:
        values.append(h.mean())
    return sum(values[-1] for values in lists)


def recomputed(net: Net, h: Tensor) -> Any:
    def part(h: Tensor) -> Tensor:
        net.kept.append(1)
        return h.sin()

    return checkpoint(part, h, use_reentrant=False)


def handed_out_as_well(net: Net, h: Tensor) -> Any:
    part = {"mean": h.mean()}
    net.kept.append(part)
    part["is it"] = part is net.alias[-1]
    return part


def kept_behind_a_break(net: Net, h: Tensor) -> Any:
    part = [h.mean()]
    net.kept.append(part)
    print(end="")
    part.append(h.sum())
    return part


def emptied(net: Net, h: Tensor) -> Any:
    if net.kept is None:
        net.kept = []
    net.kept.append(h.mean())
    if net.calls % 2:
        net.kept = None  # type: ignore[assignment]


def removed(net: Net, h: Tensor) -> Any:
    if not hasattr(net, "kept"):
        net.kept = []
    net.kept.append(h.mean())
    if net.calls % 2:
        del net.kept


def added_and_read(net: Net, h: Tensor) -> Any:
    net.kept += [h.mean()]
    return len(net.kept)


def added_through_another(net: Net, h: Tensor) -> Any:
    net.alias += [h.mean()]
    return net.kept[-1] * 2


def added_and_made_anew(net: Net, h: Tensor) -> Any:
    before = net.kept
    net.kept = []
    net.kept += [h.sum()]
    before += [h.mean()]
    return before


def put_back_behind_another(net: Net, h: Tensor) -> None:
    before = net.kept
    before += [h.mean()]
    net.kept = [1]
    net.kept = before


def put_elsewhere(net: Net, h: Tensor) -> None:
    other = net.other
    other += [h.mean()]
    net.kept = other


def added_where_settings_are_counted(net: Net, h: Tensor) -> Any:
    net.counted.kept += [h.mean()]
    return net.counted.times


def added_behind_a_break(net: Net, h: Tensor) -> None:
    net.kept += [h.mean()]
    print(end="")
    net.kept += [time.perf_counter() > 0, h.sum()]


def put_back_by_name(net: Net, h: Tensor) -> None:
    before = net.by_name["body"]
    before += [h.mean()]
    net.by_name["body"] = [1]
    net.by_name["body"] = before


def put_back_by_place(net: Net, h: Tensor) -> None:
    before = net.lists[1]
    before += [h.mean()]
    net.lists[1] = [1]
    net.lists[1] = before


def added_to_itself(net: Net, h: Tensor) -> Any:
    if len(net.last) < 2:
        net.last += [h.mean(), h.sum()]
    net.last += net.last


def added_to_a_pair(net: Net, h: Tensor) -> Any:
    try:
        net.pair[0] += [h.mean()]  # type: ignore[operator]
    except TypeError:
        net.kept += [2]
    return net.pair[0]


def by_number_and_read(net: Net, h: Tensor) -> Any:
    net.by_number[net.calls] = h.mean()
    return net.by_number[net.calls] + len(net.by_number)


def by_its_length(net: Net, h: Tensor) -> None:
    net.by_number[len(net.by_number)] = h.mean()
    net.by_number[len(net.by_number)] = h.sum()


def by_number_twice(net: Net, h: Tensor) -> Any:
    net.numbered[1] = [h.mean()]
    net.numbered[1].append(h.sum())
    net.numbered[1] += [2]
    del net.numbered[1]
    net.numbered[1] = h.mean()
    return 1 in net.numbered


def numbered_behind_a_break(net: Net, h: Tensor) -> Any:
    numbered = net.by_number
    numbered[net.calls] = h.mean()
    print(end="")
    numbered[-net.calls] = h.sum()
    return [*net.by_number]


def a_hook_by_number(net: Net, h: Tensor) -> Any:
    handle = net.head.register_forward_hook(net.hook)
    found = net.head(h)
    handle.remove()
    return found


READ: dict[str, Callable[[Any, Tensor], Any]] = {
    "made anew": made_anew,
    "handed out": handed_out,
    "behind a break": behind_a_break,
    "its length": length,
    "through another name": through_another,
    "stacked": stacked,
    "read behind a break": read_behind_a_break,
    "many": of_many,
    "recomputed": recomputed,
    "handed out as well": handed_out_as_well,
    "kept behind a break": kept_behind_a_break,
    "None in turn": emptied,
    "not there in turn": removed,
    "more of its own": lambda net, h: net.kept.extend([*net.kept[-2:], h.mean()]),
    "itself": lambda net, h: net.last.append(len(net.last)) or net.last.extend(net.last),
    "added and read": added_and_read,
    "added through another name": added_through_another,
    "added, and made anew": added_and_made_anew,
    "put back behind another": put_back_behind_another,
    "put elsewhere": put_elsewhere,
    "added where settings are counted": added_where_settings_are_counted,
    "added behind a break": added_behind_a_break,
    "put back by name": put_back_by_name,
    "put back by place": put_back_by_place,
    "added to itself": added_to_itself,
    "added to a pair": added_to_a_pair,
    "by number, and read": by_number_and_read,
    "by its length": by_its_length,
    "by number, twice": by_number_twice,
    "by number, behind a break": numbered_behind_a_break,
    "a hook, by number": a_hook_by_number,
    "whether it is empty": lambda net, h: net.kept.append(1) if net.kept else net.kept.append(0),
    "from the generator of it": lambda net, h: net.kept.extend(h.mean() for _ in range(2)),
}


@pytest.mark.parametrize("use", READ.values(), ids=READ.keys())
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_what_the_model_reads_is_what_it_would_read(use: Callable[[Any, Tensor], Any]) -> None:
    call(*pair(use), 5)


@pytest.mark.parametrize("use", [handed_out_as_well, kept_behind_a_break])
def test_what_is_kept_is_what_is_handed_out(use: Callable[[Any, Tensor], Any]) -> None:
    _, model = pair(use)
    assert all(model(X)[1] is model.kept[-1] for _ in range(3))


def test_one_that_is_emptied_in_each_call_ends_no_graph() -> None:
    plain, model = pair(stacked)
    call(plain, model, 4)
    assert len(amp_graph.plans(model)) == 2  # it was empty, or it was not
    assert not record_of(model).breaks
