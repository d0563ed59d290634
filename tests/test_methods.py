"""Methods of a model that run in mixed precision when they are called directly."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import MatmulCounter
from torch import Tensor, nn

import amp_graph
from amp_graph import Policy

X = torch.linspace(-1, 1, 24).reshape(3, 8)
METHODS = ("encode", "decode", "loss")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Coder(nn.Module):
    """Entered by five ways, three of which lead through others."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
        self.decoder = nn.Linear(3, 8)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mean and log variance."""
        mean, variance = self.encoder(x).chunk(2, -1)
        return mean * scale, variance

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = self.encode(x)
        return self.decode(mean), mean, variance

    def loss(self, x: Tensor) -> Tensor:
        y, mean, variance = self(x)
        return (y - x).square().mean() + (mean.square() - variance + variance.exp()).mean()

    def in_pieces(self, x: Tensor) -> Tensor:
        mean = self.encoder(x)
        torch._dynamo.graph_break()
        shortened = nn.functional.linear(mean, self.encoder[0].weight[:, :6])
        torch._dynamo.graph_break()
        return shortened.sum()

    def total(self, x: Tensor) -> Tensor:
        return x.sum() + self.decoder.bias.sum()


def converted(**given: Any) -> tuple[Coder, Coder]:
    """A plain model and the same one converted."""
    torch.manual_seed(0)
    plain = Coder()
    given = {"policy": "bfloat16", "methods": METHODS, **given}
    return plain, amp_graph.convert(copy.deepcopy(plain), **given)


def of_encode(model: Coder) -> Any:
    return model.encode(X, scale=2.0)


def of_decode(model: Coder) -> Any:
    return model.decode(X[:, :3])


def of_loss(model: Coder) -> Any:
    return model.loss(X)


ENTRIES = pytest.mark.parametrize("call", [of_encode, of_decode, of_loss])


def flat(results: Any) -> Tensor:
    results = results if isinstance(results, tuple) else (results,)
    assert {result.dtype for result in results} == {torch.float32}
    return torch.cat([result.flatten() for result in results])


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@ENTRIES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_method_runs_in_low_precision_as_one_graph(call: Callable[..., Any], dtype: str) -> None:
    plain, model = converted(policy=dtype)
    expected, found = flat(call(plain)), flat(call(model))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert not torch.equal(found, expected)
    (plan,) = amp_graph.plans(model)
    assert plan.converts and plan.fallback is None
    with MatmulCounter() as products:
        flat(call(model)).sum().backward()
    assert products.low_share == products.backward_low_share == 1
    flat(call(plain)).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=0.02, atol=0.02)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@ENTRIES
def test_what_is_not_named_stays_as_it_is(call: Callable[..., Any]) -> None:
    plain, model = converted(methods=())
    assert torch.equal(flat(call(plain)), flat(call(model))) == (call is not of_loss)


def test_all_ways_of_entering_share_one_scale_and_the_weights() -> None:
    _, model = converted(policy="float16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    scale = amp_graph.scale_of(model)
    first = scale.get_scale()
    (model.loss(X) * float("inf")).backward()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    flat(model(X)).mean().backward()  # the next round begins
    assert scale.get_scale() == first / 2
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    assert torch.equal(model(X)[1], model.encode(X)[0])


def test_two_ways_of_entering_before_one_backward_pass() -> None:
    plain, model = converted(policy="float16")
    for each in (plain, model):
        (each.loss(X) + flat(each.encode(X)).square().sum()).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=0.01, atol=0.01)


def test_an_optimizer_that_was_given_tells_whether_it_stepped() -> None:
    model = Coder()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp_graph.convert(model, optimizer, policy="float16", methods=METHODS)
    model.loss(X).backward()
    assert optimizer.step() is True


def test_methods_called_by_others_are_part_of_their_graph() -> None:
    _, model = converted(policy=Policy("bfloat16", output_dtype=torch.float64))
    assert model.loss(X).dtype is torch.float64
    (plan,) = amp_graph.plans(model)
    assert sum("linear" in facts.op for facts in plan.facts.values()) == 3


@torch.compiler.disable
def encoded(model: Coder, x: Tensor) -> Tensor:
    return model.encode(x)[0]


class EntersAgain(Coder):
    def forward(self, x: Tensor) -> Tensor:
        return self.decode(encoded(self, x.sin()))


def test_gradients_of_inputs_are_finite_where_a_model_enters_itself_again() -> None:
    """Those of an input are wanted in all of the call around it: 1 times 2^16 is no float16."""
    x, found = X.clone().requires_grad_(), []
    plain, model = EntersAgain(), EntersAgain()
    model.load_state_dict(plain.state_dict())
    amp_graph.convert(model, torch.optim.SGD(model.parameters()), policy="float16", methods=METHODS)
    for each in (plain, model):
        each(X).square().mean().backward()
        found += torch.autograd.grad(each(x).sum(), x)
    torch.testing.assert_close(found[1], found[0], rtol=0.01, atol=0.001)


def test_code_between_graphs_of_a_method_runs_under_autocast() -> None:
    _, model = converted(methods=("in_pieces",))
    model.in_pieces(X)
    with MatmulCounter() as products:
        model.in_pieces(X)
    assert products.low_share == 1


def test_a_deep_copy_has_methods_of_its_own() -> None:
    _, model = converted()
    expected = model.loss(X)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    for call in (of_encode, of_decode, of_loss):
        twice, other = flat(call(copied)), flat(call(copied))
        assert torch.equal(twice, other) and not torch.equal(twice, flat(call(model)))
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied.loss(X), expected)
    del model
    assert torch.equal(copied.loss(X), expected)


def test_what_is_pickled_or_restored_is_plain() -> None:
    plain, model = converted()
    loaded = pickle.loads(pickle.dumps(model))
    assert inspect.ismethod(loaded.encode) and torch.equal(plain.loss(X), loaded.loss(X))
    assert not torch.equal(plain.loss(X), model.loss(X))
    amp_graph.restore(model)
    assert not vars(model).keys() & {*METHODS}
    assert torch.equal(plain.loss(X), model.loss(X))


def test_a_method_looks_as_it_did() -> None:
    plain, model = converted()
    assert inspect.signature(model.encode) == inspect.signature(plain.encode)
    assert model.encode.__doc__ == plain.encode.__doc__
    assert model.encode.__name__ == "encode"
    assert model.encode.__code__ is Coder.encode.__code__ and model.encode.__self__ is model


def test_a_method_that_is_replaced_in_the_class_is_captured_anew(monkeypatch) -> None:
    _, model = converted()
    model.decode(X[:, :3])
    monkeypatch.setattr(Coder, "decode", lambda self, z: self.decoder(z) + 100)
    assert model.decode(X[:, :3]).min() > 50


def test_a_model_that_is_trained_by_a_method_is_not_told_of(recwarn) -> None:
    _, model = converted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model.loss(X).backward()
        optimizer.step()
    assert not recwarn.list


def test_a_method_of_which_nothing_is_converted_is_told_of(recwarn) -> None:
    _, model = converted(methods=("total",))
    model(X)
    assert not recwarn.list
    model.total(X)
    (warning,) = recwarn.list
    assert "nothing of Coder.total was converted" in str(warning.message)


def test_saved_plans_are_for_methods_as_well(tmp_path) -> None:
    _, model = converted(policy=Policy("bfloat16", keep_float32=("decoder",)))
    model.loss(X)
    amp_graph.save_plan(amp_graph.plans(model), tmp_path / "plan.json")
    _, again = converted(policy=None, plan=tmp_path / "plan.json")
    assert torch.equal(again.loss(X), model.loss(X))
    with pytest.raises(amp_graph.PlanError):
        again.decode(X[:, :3])


def test_a_program_is_made_of_the_plain_methods() -> None:
    plain, model = converted()
    program = torch.export.export(model, (X,)).module()
    assert torch.equal(flat(program(X)), flat(plain(X)))


def test_a_part_is_captured_with_the_model_around_it() -> None:
    """As is its call, if the policies are equal."""
    plain, inner = converted()

    class Outer(nn.Module):
        def __init__(self, inner: Coder) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.loss(x) + self.inner(x)[0].sum()

    outer = amp_graph.convert(Outer(inner), policy="bfloat16")
    torch.testing.assert_close(outer(X), Outer(plain)(X), rtol=0.02, atol=0.02)
    assert len(amp_graph.plans(outer)) == 1 and not amp_graph.plans(inner)


def test_a_model_that_is_converted_keeps_its_methods() -> None:
    _, model = converted(methods=("encode",))
    with pytest.warns(UserWarning, match="to change its policy or its methods"):
        amp_graph.convert(model, methods=("encode", "decode"))
    assert "decode" not in vars(model)
