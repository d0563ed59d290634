"""Parts of a script's models that are called by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import X, net
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph


def test_a_part_that_was_called_before_the_whole_is_taken_into_it(start):
    installation, model = start(), net()
    model[0](X)
    assert amp_graph.is_converted(model[0])
    model(X)
    assert amp_graph.is_converted(model) and not amp_graph.is_converted(model[0])
    assert [m.name for m in installation.models.seen] == ["Linear", "Sequential"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_that_are_trained_by_themselves_after_a_call_of_the_whole_are_converted(
    start, dtype, capsys
):
    installation, model = start(DTYPE=dtype), net()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        with torch.no_grad():
            model(X)  # validation, which comes first, as a check
        for each, part in ((model, nn.Module.__call__), (plain, lambda m, x: m.forward(x))):
            part(each[2], part(each[1], part(each[0], X))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [m.name for m in installation.models.seen] == ["Sequential", "Linear", "Linear"]
    records = [m.record for m in installation.models.seen]
    assert [[*record.runs.values()] for record in records] == [[3], [3], [3]]
    assert all(plan.low and not plan.fallback for r in records for plan in r.plans)
    torch.testing.assert_close(model[0].weight, plain[0].weight, rtol=0.02, atol=0.02)
    assert "is trained in float32" not in capsys.readouterr().err


class Tagger(nn.Module):
    """Trained by a method that reads a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(3))

    def loss(self, x):
        return (self.layer(x) * self.scale).square().mean()

    def forward(self, x):
        return (self.layer(x) * self.scale).argmax(-1)


def test_a_model_that_is_trained_by_a_method_is_not_told_of(start, capsys):
    installation, model = start(), Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            model(X)
        model.loss(X).backward()
        optimizer.step()
    assert [m.name for m in installation.models.seen] == ["Tagger", "Linear"]
    assert "is trained in float32" not in capsys.readouterr().err


def test_a_part_that_is_used_by_itself_in_evaluation_is_converted(start):
    """As an average of the weights is, or the encoder that `generate` calls; a look is not use."""
    installation, model = start(), net().eval()
    exact = model[0].forward(X)
    with torch.no_grad():
        model(X)
        looks = [model[0](X) for _ in range(3)]
        assert all(torch.equal(look, exact) for look in looks)
        assert not amp_graph.is_converted(model[0])
        used = [model[0](X) for _ in range(3)]
    assert amp_graph.is_converted(model[0]) and amp_graph.is_converted(model)
    assert not any(torch.equal(each, exact) for each in used)
    assert [m.name for m in installation.models.seen] == ["Sequential", "Linear"]
    assert [m.record.runs.total() for m in installation.models.seen] == [1, 3]


def test_what_the_script_converts_is_captured_with_parts_that_were_called_before(start) -> None:
    start(DTYPE="bfloat16")
    model = net()
    model[0](X)
    assert amp_graph.is_converted(model[0])
    amp_graph.convert(model, policy=amp_graph.Policy("bfloat16", level="safe"))(X)
    assert not amp_graph.is_converted(model[0])
    (plan,) = amp_graph.plans(model)
    assert plan.has_low


def test_parts_of_a_model_that_is_left_to_the_script_s_autocast_are_left_with_it(start) -> None:
    installation, model = start(), net().eval()
    with torch.no_grad():
        model(X)
        for _ in range(4):
            model[0](X)
    assert amp_graph.is_converted(model[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype is torch.bfloat16
    assert not amp_graph.is_converted(model) and not amp_graph.is_converted(model[0])
    assert all(m.record is None for m in installation.models.seen)


def test_a_part_of_a_model_that_is_gone_is_a_model(start):
    installation, model = start(), net()
    model(X)
    head = model[2]
    del model
    with torch.no_grad():
        head(torch.ones(2, 8))
    assert amp_graph.is_converted(head)
    assert [m.name for m in installation.models.seen] == ["Sequential", "Linear"]


def test_a_part_that_a_backward_pass_calls_again_runs_as_it_did(start):
    installation, model = start(), net()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = model

        @torch._dynamo.disable
        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=True)

    whole = Whole()
    whole(X.clone().requires_grad_()).sum().backward()
    assert [m.name for m in installation.models.seen] == ["Whole"]
    assert not amp_graph.is_converted(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_whole_is_captured_as_one_with_the_parts_that_go_on_alone(start, dtype):
    installation, model = start(DTYPE=dtype), net()
    for rows in (1, 3, 5):  # the second and third are captured after the parts were converted
        with torch.no_grad():
            model(X[:1].expand(rows, 8))
        model[2](model[1](model[0](X))).sum().backward()
    assert amp_graph.is_converted(model[0])
    whole = installation.models.seen[0].record
    assert whole.runs.total() == 3 and not whole.breaks
    assert all(len(plan.low) >= 3 for plan in whole.plans)


@pytest.mark.filterwarnings("error:.*is trained in float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_converted_part_is_taken_into_a_whole_of_an_equal_policy(dtype):
    model = net()
    plain = copy.deepcopy(model)
    amp_graph.convert(model[0], policy=amp_graph.Policy(dtype))
    amp_graph.convert(model, policy=amp_graph.Policy(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert len(amp_graph.plans(model)) == 1 and not amp_graph.plans(model[0])
    plain(X).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=0.02, atol=0.01)


def test_a_converted_part_keeps_a_policy_of_its_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x))

    model = Two()
    amp_graph.convert(model.body, policy=amp_graph.Policy("bfloat16"))
    amp_graph.convert(model, policy=amp_graph.Policy("float16"))
    model(X)
    assert [plan.dtype for plan in amp_graph.plans(model.body)] == [torch.bfloat16]
    assert [plan.dtype for plan in amp_graph.plans(model)] == [torch.float16]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("what", ["plan", "output dtype"])
def test_a_converted_part_keeps_its_plan_and_output_dtype_in_a_whole_of_an_equal_policy(what):
    class Widening(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x).float())

    model = Widening()
    policy = amp_graph.Policy("bfloat16", output_dtype="bfloat16" if what != "plan" else None)
    amp_graph.convert(model.body, policy=policy)(X)
    plan = amp_graph.plans(model.body) if what == "plan" else None
    amp_graph.convert(amp_graph.restore(model.body), policy=policy, plan=plan)
    amp_graph.convert(model, policy=policy)(X)
    assert len(amp_graph.plans(model.body)) == 1


def test_a_converted_part_of_what_a_script_compiles_runs_its_graphs():
    model = net()
    amp_graph.convert(model[0], policy="bfloat16")
    torch.compile(model, backend="eager")(X)
    assert len(amp_graph.plans(model[0])) == 1
