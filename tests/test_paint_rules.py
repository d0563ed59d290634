"""What the user and the model's own code ask for, and inner graphs."""

import pytest
import torch
from graphs import BFLOAT16, SIZE, W, X, capture, rewritten, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph import PolicyError
from amp_graph.ir import Color
from amp_graph.override import Override
from amp_graph.policy import Policy


def mlp(x, w):
    return torch.tanh(torch.relu(x @ w) @ w) @ w


def with_overrides(*overrides):
    return run(mlp, X, W, policy=Policy("bfloat16", overrides=overrides))


def test_override_by_operator():
    result = with_overrides(Override("deny", op="aten.tanh"))
    assert (result.color("infer1"), result.rule("infer1")) == (Color.DENY, "override")
    assert not result.is_low("infer1")
    assert not any(with_overrides(Override("deny", op="aten.matmul")).plan.low)
    assert Override("deny", op="matmul") == Override("deny", op="aten.matmul"), "as lists take it"


def test_override_by_name():
    result = with_overrides(Override("deny", name="allow[12]"))
    assert [result.is_low(f"allow{i}") for i in (1, 2, 3)] == [False, False, True]


def test_override_by_predicate():
    def second(facts):
        return facts.name == "allow2"

    result = with_overrides(Override("deny", where=second))
    assert [result.is_low(f"allow{i}") for i in (1, 2, 3)] == [True, False, True]
    assert "second" in result.plan.paints["allow2"].because
    both = Override("deny", module="enc", where=second)
    assert str(both) == "module=enc, where=second"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).relu()


@pytest.mark.parametrize("example_inputs", [None, (torch.randn(2, 8),)])
def test_a_predicate_that_raises_is_told_of(example_inputs):
    def misspelt(facts):
        return facts.nosuch

    policy, model = Policy("bfloat16", overrides=Override("deny", where=misspelt)), Net()
    said = r"where=misspelt\) raised AttributeError.*'nosuch' for .*test_paint_rules.py:\d+"
    with pytest.raises(PolicyError, match=said):
        amp_graph.convert(model, policy=policy, example_inputs=example_inputs)(torch.randn(2, 8))


def test_the_first_override_that_matches_wins():
    result = with_overrides(Override("allow", name="allow2"), Override("deny", op="aten.matmul"))
    assert [result.is_low(f"allow{i}") for i in (1, 2, 3)] == [False, True, False]


def test_an_override_by_operator_is_for_the_operator_in_place_too():
    for op in ("aten.relu", "aten.relu.default", "aten.relu_"):
        policy = Policy("bfloat16", overrides=Override("deny", op=op))
        result = run(lambda x, w: (x @ w).relu_() @ w, W, W, policy=policy)
        assert not result.is_low("relu_")


@pytest.mark.parametrize(("level", "is_narrowed"), [("balanced", False), ("max", True)])
def test_what_is_dropped_out_of_float32_is_rounded_once(level, is_narrowed):
    """To drop out scales what is left, which rounds. Of low values it has no float32 to keep."""

    def adapter(x, w):
        wide = F.layer_norm(x @ w, (SIZE,))
        return F.dropout(F.dropout(wide, 0.1) @ w, 0.1) @ w + wide @ w

    result = run(adapter, X, W, policy=Policy("bfloat16", level=level))
    assert (result.is_low("infer1"), result.is_low("infer2")) == (is_narrowed, True)


def test_override_to_allow_and_to_a_free_colour():
    allowed = run(
        lambda x, w: (x @ w).exp(),
        X,
        W,
        policy=Policy("bfloat16", overrides=(Override("allow", op="aten.exp"),)),
    )
    assert allowed.is_low("deny1")
    free = with_overrides(Override("infer", op="aten.matmul"))
    assert not any(free.plan.low)  # nothing makes them low
    clear = run(
        lambda x, w: (x @ w).exp() @ w,
        X,
        W,
        policy=Policy("bfloat16", overrides=(Override("clear", op="aten.exp"),)),
    )
    assert clear.is_low("deny1")


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


def low_modules(model, policy):
    amp_graph.convert(model, policy=policy, example_inputs=(X,))
    (plan,) = amp_graph.plans(model)
    linear = (f for f in plan.facts.values() if f.op == "aten.linear.default")
    return {f.module_path: f.name in plan.low for f in linear}


def test_override_by_module():
    policy = Policy("bfloat16", overrides=(Override("deny", module="encoder.1"),))
    low = low_modules(Stages(), policy)
    assert low == {"encoder.0": True, "encoder.1": False, "head": True}


def test_keep_float32_covers_all_modules_below():
    low = low_modules(Stages(), Policy("bfloat16", keep_float32=("enc*",)))
    assert low == {"encoder.0": False, "encoder.1": False, "head": True}


def test_a_float_call_of_the_model_is_kept():
    def function(x, w):
        h = (x @ w).float()
        return (h * h + h).relu() @ w

    result = run(function, X, W)
    assert result.rule("clear1") == "user cast"
    assert [result.is_low(n) for n in ("infer1", "infer2", "allow1", "allow2")] == [
        False,
        False,
        True,
        True,
    ]


def test_a_float_call_for_products_alone_asks_for_nothing():
    """As `x.to(weight.dtype)` in front of a layer: up to float32, and down again."""

    def function(x, w):
        alone, beside = torch.relu(x @ w).float(), torch.relu(w @ x).float()
        return alone @ w, beside @ w, beside.sum(0)

    result = run(function, X, X.t().contiguous())
    assert result.is_low("clear2") and not result.is_low("clear4")
    assert result.rule("clear4") == "user cast"
    h = torch.relu(X.bfloat16() @ X.t().bfloat16())
    assert torch.equal(result(X, X.t())[0], (h @ X.t().bfloat16()).float())


def test_the_way_back_from_what_was_asked_for_in_float32_asks_for_nothing():
    """As in transformers' attention. It is a conversion to the type of the whole model."""

    def function(x, w):
        back = torch.softmax(x @ w, -1, dtype=torch.float32).to(w.dtype)
        return back @ w, (x @ w).float().to(w.dtype).relu() @ w

    result = run(function, X, W, policy=Policy("bfloat16"))
    assert result.is_low("deny1") and result.is_low("clear1")
    assert [result.rule(name) for name in ("clear2", "clear3")] == ["user cast", "user cast"]
    result = run(function, X, W)  # level safe
    assert not (result.is_low("deny1") or result.is_low("clear1"))
    assert result.casts().count("clear1 -> bfloat16") == 1


def test_a_half_precision_region_of_the_model_is_kept():
    def function(x, w):
        h = x.half() @ w.half()
        return h.float() @ w

    result = run(function, X, W)
    assert result.color("allow1") is Color.KEEP
    assert result.module.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    exact = (X.half() @ W.half()).bfloat16() @ W.bfloat16()
    assert torch.equal(result(X, W), exact.float())


def test_autocast_regions_of_the_model_keep_their_meaning():
    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(SIZE, SIZE) for _ in range(3))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.a(x)
            with torch.autocast("cpu", dtype=torch.float16):
                y = self.b(x)
            return self.c(x), y

    low = low_modules(model := Regions(), BFLOAT16)
    assert low == {"a": False, "b": False, "c": True}
    outputs = model(X)
    assert [t.dtype for t in outputs] == [torch.float32, torch.float16]
    assert torch.equal(outputs[1], amp_graph.restore(model)(X)[1])


class Branches(nn.Module):
    """Both branches of a cond return what one linear made and the other denied."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        h = self.a(x)
        chosen = torch.cond(h.sum() > 0, lambda h: self.b(h).relu(), lambda h: h.exp() * 0.1, (h,))
        return self.b(chosen)


def test_the_bodies_of_a_branch_agree_on_the_dtypes_they_carry():
    torch.manual_seed(0)
    model = Branches()
    amp_graph.convert(model, policy="bfloat16", example_inputs=(X,))
    (plan,) = amp_graph.plans(model)
    assert len(plan.bodies) == 2
    assert all(body.fallback is None for body in plan.bodies.values())
    assert sorted(any(body.low) for body in plan.bodies.values()) == [False, True]
    for x in (X, -X):
        converted = model(x)
        amp_graph.restore(model)
        torch.testing.assert_close(converted, model(x), rtol=0.05, atol=0.05)
        amp_graph.convert(model, policy="bfloat16")


def test_a_checkpointed_part_is_converted_by_itself():
    class Checkpointed(Stages):
        def forward(self, x):
            return self.head(checkpoint(self.encoder, x, use_reentrant=False))

    model = Checkpointed()
    amp_graph.convert(model, policy="bfloat16", example_inputs=(X,))
    (plan,) = amp_graph.plans(model)
    (body,) = plan.bodies.values()
    linear = [f.name for f in body.facts.values() if f.op == "aten.linear.default"]
    assert len(linear) == 2
    assert set(linear) <= body.low
    model(X).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_body_that_writes_into_its_input():
    class Writes(Stages):
        def body(self, h):
            h.mul_(3.0)
            return self.head(h)

        def forward(self, x):
            h = self.encoder(x)
            return checkpoint(self.body, h, use_reentrant=False) + h

    torch.manual_seed(0)
    model = Writes().requires_grad_(False)
    expected = model(X)
    amp_graph.convert(model, policy="bfloat16")
    torch.testing.assert_close(model(X), expected, rtol=0.05, atol=0.05)
    assert all(plan.fallback is None for plan in amp_graph.plans(model))


def test_a_scale_of_no_dimensions_stays_exact():
    """0-dimensional tensors take no part in type promotion, here as in PyTorch."""

    def function(x, w, scale):
        return ((x @ w) * scale) @ w

    scale = torch.tensor(1.001)
    result = run(function, X, W, scale, policy=BFLOAT16)
    assert result.is_low("infer1")
    assert "scale -> bfloat16" not in result.casts()
    h = (X.bfloat16() @ W.bfloat16()) * scale
    assert torch.equal(result(X, W, scale), (h @ W.bfloat16()).float())


def test_the_captured_graph_is_left_as_it_was():
    captured = capture(mlp, X, W, weights=1)
    before = str(captured.graph)
    rewritten(captured)
    assert str(captured.graph) == before
