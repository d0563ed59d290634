"""What forward hooks keep of each call, in lists that grow, is kept without another capture."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trees import assert_alike

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
Kept = dict[Any, list[Any]]


def by_name(name: str, module: nn.Module, kept: Kept) -> None:
    def keep(name: str, module: nn.Module, args: Any, y: Tensor) -> None:
        kept[name].append((tuple(y.shape), y.detach().mean()))

    module.register_forward_hook(functools.partial(keep, name))


def by_module(name: str, module: nn.Module, kept: Kept) -> None:
    module.register_forward_hook(lambda m, args, y: kept[m].append(y.detach()))


def together(name: str, module: nn.Module, kept: Kept) -> None:
    figures = kept["all"]
    module.register_forward_hook(lambda m, args, y: figures.append(y.mean().item()))


def before(name: str, module: nn.Module, kept: Kept) -> None:
    def keep(m: nn.Module, args: Any, kwargs: Any) -> None:
        kept["before"].append({"class": type(m).__name__, "given": len(args), "by name": [*kwargs]})

    module.register_forward_pre_hook(keep, with_kwargs=True)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("register", [by_name, by_module, together, before])
@pytest.mark.filterwarnings("error::amp_graph.ConversionWarning")
def test_it_is_what_the_plain_model_keeps(
    register: Callable[[str, nn.Module, Kept], None], compiler: str
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())))
    model, of_each = copy.deepcopy(plain), []  # type: Any, list[Kept]
    for net in (plain, model):
        of_each.append(defaultdict(list))
        for name, layer in net.named_children():
            register(name, layer, of_each[-1])
    policy = amp_graph.Policy("bfloat16", compiler=compiler)
    model = amp_graph.convert(model, policy=policy)
    for _ in range(5):
        model(X).sum().backward(), plain(X).sum().backward()
    theirs, ours = ([*kept.values()] for kept in of_each)
    assert_alike(ours, theirs)
    assert len(amp_graph.plans(model)) <= 3


def test_what_was_given_is_kept_and_not_read() -> None:
    class Named(nn.Linear):
        names: list[str]

        def forward(self, x: Tensor, name: str = "") -> Tensor:
            self.names.append(name)
            return super().forward(x)

    model = amp_graph.convert(Named(8, 8), policy="bfloat16")
    model.names = []
    for number in range(5):
        model(X, f"sample {number}")
    assert model.names == [f"sample {number}" for number in range(5)]
    assert len(amp_graph.plans(model)) == 1
