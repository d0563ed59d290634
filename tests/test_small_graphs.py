"""Models that are cut into so many small graphs that entering them takes longer than they save."""

from __future__ import annotations

import copy

import pytest
import torch
from counting import MatmulCounter
from nets import low_share
from several_threads import SEVERAL_THREADS, at_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import distance

import amp_graph
from amp_graph import Policy
from amp_graph.autopatch.script_models import model_of
from amp_graph.autopatch.summary import summary_of
from amp_graph.convert import record_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Solver(nn.Module):
    """Looks at what it has after each step, as solvers do that choose the next one."""

    def __init__(self, steps: int, depth: int = 1) -> None:
        super().__init__()
        self.steps = steps
        layers = (each for _ in range(depth) for each in (nn.Linear(8, 8), nn.Tanh()))
        self.slope = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = x + self.step(x)
        return x

    def step(self, x: Tensor) -> Tensor:
        slope = self.slope(x)
        return slope if slope.abs().max() < 100 else slope / 100


def pair(policy: Policy | str, *given: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Solver(*given)
    return plain, amp_graph.convert(copy.deepcopy(plain), policy=policy)


@pytest.mark.parametrize(
    "policy",
    ["bfloat16", Policy("float16", loss_scale=2.0**8)],
    ids=["bfloat16", "float16"],
)
def test_they_run_under_autocast_and_say_so(policy: Policy | str, recwarn) -> None:
    plain, model = pair(policy, 24)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(4):
        optimizer.zero_grad(), plain.zero_grad()
        model(X).mean().backward(), plain(X).mean().backward()
        assert optimizer.step() is not False
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad, q.grad) < 0.05
    assert low_share(model, X) == 1 and model(X).dtype is torch.float32
    last = amp_graph.plans(model)[-1]
    assert last.autocast and "takes longer than it saves" in (last.fallback or "")
    said = [str(w.message) for w in recwarn.list if "no longer captured" in str(w.message)]
    assert len(said) == 1 and said[0].startswith("Solver is no longer captured and runs under")


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("bfloat16", (4,)),
        ("bfloat16", (24, 8)),
        (Policy("bfloat16", keep_float32=("slope",)), (24,)),
        (Policy("bfloat16", lists={"deny": ["aten.tanh"]}), (24,)),
    ],
    ids=["few", "large", "with a part that stays in float32", "with lists of one's own"],
)
def test_others_stay_captured(policy: Policy | str, given: tuple[int, ...], recwarn) -> None:
    plain, model = pair(policy, *given)
    for _ in range(4):
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert not any("no longer captured" in str(w.message) for w in recwarn.list)


class Strict(Solver):
    """Counts its calls, and ends in an operator that takes no two dtypes, as autocast gives it."""

    def __init__(self, steps: int = 24) -> None:
        super().__init__(steps)
        self.last = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.last(super().forward(x))
        if self.fails:
            y = torch.zeros(len(x), 8).scatter(0, torch.zeros_like(x, dtype=torch.int64), y)
        return y

    def other(self, x: Tensor) -> Tensor:
        return self.forward(x)


def strict(policy: Policy | str = "bfloat16", **given: tuple[str, ...]) -> list[Strict]:
    torch.manual_seed(0)
    plain = Strict()
    return [plain, amp_graph.convert(copy.deepcopy(plain), policy=policy, **given)]


def left_and_back(recwarn, name: str) -> bool:
    """Whether it was told that the graphs were left, and then that they are not, and no more."""
    left, *back = [str(w.message) for w in recwarn.list if name in str(w.message)]
    begin = f"{name} runs by its captured graphs again, small as they are: autocast fails ("
    is_left = left.startswith(f"{name} is no longer captured and runs under autocast: ")
    return is_left and len(back) == 1 and back[0].startswith(begin) and "scatter()" in back[0]


@pytest.mark.parametrize(
    "policy",
    ["bfloat16", Policy("float16", loss_scale=2.0**8)],
    ids=["bfloat16", "float16"],
)
def test_they_run_again_where_autocast_fails(policy: Policy | str, recwarn) -> None:
    plain, model = strict(policy)
    for _ in range(6):
        plain.zero_grad(), model.zero_grad()
        with MatmulCounter() as counter:
            model(X).mean().backward()
        plain(X).mean().backward()
        assert counter.low_share == counter.backward_low_share == 1
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad, q.grad) < 0.05
        assert torch.equal(model.calls, plain.calls)
    assert left_and_back(recwarn, "Strict")
    assert not any(plan.fallback for plan in amp_graph.plans(model))
    report = amp_graph.explain(model).data
    operators = report.modules[0].figures.operators
    assert operators.low > 0 and not report.nothing and not report.fallbacks and not report.note


def test_they_run_again_by_the_name_of_a_method(recwarn) -> None:
    """Beside the call, which is captured after the method was left."""
    plain, model = strict(methods=("other",))
    for _ in range(3):
        model.fails = False
        model.other(X)
    model(X)
    model.fails = True
    for _ in range(4):
        assert low_share(model.other, X) == 1
        torch.testing.assert_close(model.other(X), plain.other(X), rtol=0.05, atol=0.05)
    assert left_and_back(recwarn, "Strict.other")
    report = amp_graph.explain(model)
    assert not report.data.fallbacks and len(report.data.graphs) > 1
    told = model_of(model)
    told.record = record_of(model)
    assert not summary_of(told).as_json()["fallbacks"]


class Wrong(Exception):
    """The user's."""


class Checked(Strict):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.isnan().any():
            raise Wrong
        return y


@pytest.mark.parametrize(("given", "error"), [(X * torch.nan, Wrong), (X[:, :3], RuntimeError)])
def test_an_error_of_the_users_changes_nothing(
    given: Tensor, error: type[Exception], recwarn
) -> None:
    torch.manual_seed(0)
    model = amp_graph.convert(Checked(), policy="bfloat16")
    model.fails = False
    for _ in range(3):
        model(X)
        plans = amp_graph.plans(model)
    for _ in range(3):
        with pytest.raises(error):
            model(given)
        assert amp_graph.plans(model)[: len(plans)] == plans
        graphs = amp_graph.explain(model).data.graphs
        assert [g.nodes for g in graphs] == [0] and "under autocast" in (graphs[0].fallback or "")
        assert low_share(model, X) == 1
    assert len([w for w in recwarn.list if "Checked" in str(w.message)]) == 1
    model.fails = True
    assert low_share(model, X) == low_share(model, X) == 1
    assert left_and_back(recwarn, "Checked")


def test_hooks_that_came_meanwhile_are_seen(recwarn) -> None:
    plain, model = strict()
    model(X), model(X)
    for each in (plain, model):
        each.last.register_forward_hook(lambda module, given, result: result * 2)
    for _ in range(4):
        torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert left_and_back(recwarn, "Strict")


@torch.compiler.disable
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class Late(Solver):
    """Multiplies matrices behind its graphs, if its input is large. What fails is in the first."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            y = super().forward(self.begin(x))
            if x.max() > 1:
                y = product(y, self.slope[0].weight)
        return y

    def begin(self, x: Tensor) -> Tensor:
        return torch.zeros(4, 8).scatter(0, torch.zeros_like(x, dtype=torch.int64), self.slope(x))


def test_code_between_them_runs_under_autocast_again(recwarn) -> None:
    """It was met in the call in which the graphs would have been left."""
    torch.manual_seed(0)
    model = amp_graph.convert(Late(24), policy="bfloat16")
    for x in (X / 10, X, X, X, X):
        model(x)
    assert left_and_back(recwarn, "Late")
    assert low_share(model, X) == 1
    (fallback,) = amp_graph.explain(model).data.fallbacks
    assert "runs under autocast: code between graphs" in fallback


def test_they_run_again_in_a_backward_pass(recwarn) -> None:
    plain, model = strict()
    for _ in range(5):
        plain.zero_grad(), model.zero_grad()
        for each in (plain, model):
            checkpoint(each, X.clone().requires_grad_(), use_reentrant=True).mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert distance(p.grad, q.grad) < 0.05
    assert left_and_back(recwarn, "Strict")


def test_sizes_that_are_new_are_captured(recwarn) -> None:
    plain, model = strict()
    model(X), model(X)
    for x in (X[:3], X[:2], X):
        assert low_share(model, x) == 1
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    assert left_and_back(recwarn, "Strict")
    assert not amp_graph.explain(model).data.fallbacks


def test_where_hooks_rule_autocast_out_they_stay(recwarn) -> None:
    """Code that is not captured would run in float32, as the hooked module does."""
    _, model = strict()
    model.last.register_full_backward_hook(lambda module, given, taken: None)
    for _ in range(4):
        with MatmulCounter() as counter:
            model(X).mean().backward()
        assert counter.low_share == 24 / 25
    assert not any("no longer captured" in str(w.message) for w in recwarn.list)


class TestThreads:
    pytestmark = SEVERAL_THREADS

    def test_all_go_back_and_one_tells(self, recwarn) -> None:
        plain, model = strict()
        model(X), model(X)
        for _ in range(3):
            for result in at_once(8, lambda k: torch.no_grad()(model)(X)):
                torch.testing.assert_close(result, plain(X), rtol=0.05, atol=0.05)
        assert low_share(model, X) == 1
        assert left_and_back(recwarn, "Strict")

    def test_an_error_in_one_of_them_is_its_own(self, recwarn) -> None:
        plain, model = strict()
        model(X), model(X)
        results = at_once(8, lambda k: torch.no_grad()(model)(X[:, :3] if k % 2 else X))
        for result in results[::2]:
            torch.testing.assert_close(result, plain(X), rtol=0.05, atol=0.05)
        assert all(isinstance(result, RuntimeError) for result in results[1::2])
        assert low_share(model, X) == low_share(model, X) == 1
        assert left_and_back(recwarn, "Strict")
        assert not amp_graph.explain(model).data.fallbacks
