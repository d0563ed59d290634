"""A model may ask of which class a value is and what that is called, and name axes in a list of its
own kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables import SkipFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._higher_order_ops.scan import scan
from training import distance, twins
from two_layers import BFLOAT16, Loop, Speaking, Two, X

import amp_graph
from amp_graph.convert import record_of


class AsksForNames(Speaking):
    """As PEFT does for each weight in DoRA."""

    def speak(self, hidden: Tensor) -> None:
        if type(self.a.weight).__module__.startswith("torchao."):
            raise TypeError
        if hidden.__class__.__name__.lower() != "tensor":
            raise TypeError


@pytest.mark.usefixtures("fresh_dynamo")
def test_names_of_classes_do_not_end_a_graph() -> None:
    own = "call_method" in GetAttrVariable.__dict__
    model = amp_graph.convert(Loop(AsksForNames), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert plan.low
    assert ("call_method" in GetAttrVariable.__dict__) == own


class Axes(list[int]):
    """A list of a subclass, such as Keras makes of those that a layer holds."""


class TakesOwnLists(Speaking):
    def __init__(self) -> None:
        super().__init__()
        self.axes = Axes([0, 1])

    def speak(self, hidden: Tensor) -> None:
        if torch.mean(hidden, self.axes, keepdim=True).shape != (1, 1):
            raise TypeError


@pytest.mark.usefixtures("fresh_dynamo")
def test_nor_does_an_operator_that_takes_a_list_of_a_subclass() -> None:
    model = amp_graph.convert(Loop(TakesOwnLists), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    model.blocks[0].axes[:] = [1]
    with pytest.raises(TypeError):
        model(X)


class AsksForClasses(Speaking):
    """As MONAI's U-Nets do for each skip connection."""

    def speak(self, hidden: Tensor) -> None:
        if not torch.jit.isinstance(hidden, Tensor):
            raise TypeError
        if torch.jit.isinstance(None, Tensor) or not torch.jit.isinstance(1, (Tensor, int)):
            raise TypeError


class AsksForArguments(Speaking):
    """As MONAI does for each grid of positions, in registration networks, say."""

    def speak(self, hidden: Tensor) -> None:
        taken = torch.meshgrid.__kwdefaults__
        if taken is None or "indexing" not in taken or "other" in taken:
            raise TypeError


class CountsUp(Speaking):
    """As MONAI's losses name the axes that they sum over."""

    def speak(self, hidden: Tensor) -> None:
        axes: list[int] = torch.arange(hidden.dim(), device=hidden.device).tolist()
        axes.append(0)
        if axes != [0, 1, 0] or torch.arange(1, 6, 2).tolist() != [1, 3, 5]:
            raise TypeError
        if hidden.mean(dim=axes[:2]).dim():
            raise TypeError


class CountsUpAndWrites(Speaking):
    def speak(self, hidden: Tensor) -> None:
        axes = torch.arange(2)
        axes[0] = 1
        if axes.tolist() != [1, 1]:
            raise TypeError


class AsksForContents(Speaking):
    def speak(self, hidden: Tensor) -> None:
        if not torch.jit.isinstance([hidden], list[Tensor]):
            raise TypeError


@pytest.mark.usefixtures("fresh_dynamo")
def test_questions_for_classes_do_not_end_a_graph() -> None:
    own = SkipFunctionVariable.call_function
    model = amp_graph.convert(Loop(AsksForClasses), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert plan.low
    assert SkipFunctionVariable.call_function is own


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("block", [AsksForArguments, CountsUp])
def test_nor_do_questions_for_what_is_there_from_the_start(block: type[Speaking]) -> None:
    model = amp_graph.convert(Loop(block), policy="bfloat16")
    model(X).sum().backward()
    assert not record_of(model).breaks
    (plan,) = amp_graph.plans(model)
    assert plan.low


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_numbers_that_were_written_to_are_those_that_were_written() -> None:
    amp_graph.convert(Loop(CountsUpAndWrites), policy="bfloat16")(X).sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_questions_for_what_a_container_holds_do() -> None:
    model = amp_graph.convert(Loop(AsksForContents), policy="bfloat16")
    model(X).sum().backward()
    assert record_of(model).breaks


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_container_without_contents_is_refused_as_ever() -> None:
    class Wrong(Speaking):
        def speak(self, hidden: Tensor) -> None:
            torch.jit.isinstance([hidden], list)

    model = amp_graph.convert(Loop(Wrong), policy="bfloat16")
    with pytest.raises(RuntimeError, match="contained type"):
        model(X)


class Scanned(Two):
    """Dynamo calls methods of what is carried by keywords."""

    def forward(self, x: Tensor) -> Tensor:
        _, sums = scan(lambda so_far, x: (so_far + x, so_far * x), torch.zeros(8), self.a(x), dim=0)
        return self.b(sums)


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_a_scan_is_captured() -> None:
    plain, model = twins(Scanned(), amp_graph.Policy("bfloat16"))
    assert distance(model(X), plain(X)) <= BFLOAT16
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and plan.low


class DropsLayers(Speaking):
    """As transformers did up to 5.17."""

    drop = 0.0

    def forward(self, x: Tensor) -> Tensor:
        to_drop = False
        if self.training:
            if torch.rand([]) < self.drop:
                to_drop = True
        return x if to_drop else torch.dropout(super().forward(x), 0.5, True)

    def speak(self, hidden: Tensor) -> None:
        pass


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("drop", "ends"), [(0.0, False), (0, False), (1.0, False), (0.5, True)])
@pytest.mark.filterwarnings("ignore::amp_graph.ConversionWarning")
def test_layers_that_are_never_dropped_do_not(drop: float, ends: bool, monkeypatch) -> None:
    monkeypatch.setattr(DropsLayers, "drop", drop)
    plain, model = twins(Loop(DropsLayers), amp_graph.Policy("bfloat16"))
    results, states = [], []
    for each in (plain, model):
        torch.manual_seed(1)
        results.append(each(X))
        states.append(torch.get_rng_state())
    assert bool(record_of(model).breaks) is ends
    assert distance(results[1], results[0]) <= BFLOAT16
    assert torch.equal(*states)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_random_number_that_is_compared_may_be_a_tensor() -> None:
    class Gated(Speaking):
        def speak(self, hidden: Tensor) -> None:
            hidden.mul_((torch.rand([]) < 1.0).float())

    plain, model = twins(Loop(Gated), amp_graph.Policy("bfloat16"))
    assert distance(model(X), plain(X)) <= BFLOAT16
    assert not record_of(model).breaks


@pytest.mark.usefixtures("fresh_dynamo")
def test_several_random_numbers_have_no_truth() -> None:
    class Confused(Speaking):
        def speak(self, hidden: Tensor) -> None:
            if torch.rand(3) < 1:
                hidden.zero_()

    model = amp_graph.convert(Loop(Confused), policy="bfloat16")
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        model(X)
