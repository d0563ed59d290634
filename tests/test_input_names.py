"""What plans call the inputs of graphs: parameters and buffers by their paths, the rest as the
model's code does."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

import amp_graph
from amp_graph import Plan
from amp_graph.inspection.spelling import input_kind

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def labels(model: nn.Module) -> list[str]:
    facts = (f for plan in amp_graph.plans(model) for f in plan.facts.values())
    return [f.label for f in facts if f.op == "placeholder"]


class Spelled(nn.Module):
    """Parts whose names are alike in the letters of an identifier, or have other letters."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("fc1", "fc_1", "FC1", "wQ", "größe", "parameters_x", "modules_"):
            self.add_module(name, nn.Linear(4, 4, bias=False))
        self.A_log = nn.Parameter(torch.randn(4))
        self.by_key = nn.ParameterDict({"Key": torch.randn(4)})
        self.register_buffer("Mean", torch.randn(4))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fc1.weight

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            if isinstance(module, nn.Linear):
                x = module(x)
        return x * self.A_log + self.by_key["Key"] + self.Mean


def test_stored_tensors_go_by_their_paths() -> None:
    model = amp_graph.convert(Spelled(), policy="bfloat16")
    model(torch.randn(2, 4))
    stored = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert sorted(labels(model)) == sorted([*stored, "x"])
    program = amp_graph.export(Spelled(), (torch.randn(2, 4),), policy="bfloat16")
    assert "x_bfloat16" in program.graph_module.code


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_buffer("shift", torch.ones(4))
        self.kept = torch.ones(4)

    def forward(self, x: Tensor, ring_buffers_x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.shift + self.kept + ring_buffers_x


KINDS = {
    "layer.weight": "parameter",
    "layer.bias": "parameter",
    "layer.shift": "buffer",
    "kept": "input",
    "x": "input",
    "ring_buffers_x": "input",
}


def kinds(plan: Plan) -> dict[str, str]:
    return {f.label: input_kind(f) for f in plan.facts.values() if f.op == "placeholder"}


def test_a_buffer_is_told_from_an_argument_of_such_a_name(monkeypatch, tmp_path) -> None:
    model, given = Shifted(), (torch.ones(2, 4), torch.ones(4))
    exports, exported = sys.modules["amp_graph.export"], []
    decide = exports.decide
    monkeypatch.setattr(exports, "decide", lambda *a: exported.append(decide(*a)) or exported[0])
    amp_graph.export(model, given, policy="bfloat16")
    amp_graph.convert(model, policy="bfloat16")(*given)
    (plan,) = amp_graph.plans(model)
    assert kinds(plan) == KINDS
    assert KINDS.items() - kinds(exported[0].plan).items() == {("kept", "input")}  # a constant
    amp_graph.save_plan(plan, tmp_path / "plan.json")
    assert kinds(amp_graph.load_plan(tmp_path / "plan.json")[0]) == KINDS


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept = [torch.ones(4)]

    def forward(self, x: Tensor, batch: dict, *rest: Tensor, scale: Tensor, **more: Tensor):
        y = self.layer(x) * batch["In put"] + batch["pair"][1] * scale
        return y + rest[0] * rest[1] + more["shift"] + self.kept[0]

    def encode(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens)


def test_arguments_go_by_their_names() -> None:
    model = amp_graph.convert(Taking(), policy="bfloat16", methods=["encode"])
    a, b, c, d, e, f, g = (torch.ones(4) for _ in range(7))
    model(torch.ones(2, 4), {"In put": a, "pair": (b, c)}, d, e, scale=f, shift=g)
    assert set(labels(model)) == {
        "layer.weight", "layer.bias", "x", "batch['In put']", "batch['pair'][1]", "scale",
        "rest[0]", "rest[1]", "shift", "kept[0]",
    }  # fmt: skip
    model.encode(torch.ones(2, 4))
    assert "tokens" in labels(model)


class Broken(nn.Module):
    """What is behind a break begins in the middle of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Taking()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        args = (self.inner.encode(x),)
        torch._dynamo.graph_break()
        return self.last(args[0])


def test_behind_a_break_names_are_those_of_the_code() -> None:
    model = amp_graph.convert(Broken(), policy="bfloat16")
    model(torch.ones(2, 4))
    assert sorted(labels(model)) == [
        "args[0]", "inner.layer.bias", "inner.layer.weight", "last.bias", "last.weight", "x",
    ]  # fmt: skip
