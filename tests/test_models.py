"""Whole models of many architectures, converted: precision, errors and model semantics."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Iterator

import amp_graph
import pytest
import torch
import zoo
from amp_graph.ir import Plan
from counting import MatmulCounter
from zoo.measure import autocast, errors, excess, ratio, step, steps

CASES = zoo.cases()
BATCHES = 20
LOW_SHARE = 0.9
ALLOWED_RATIO = 1.2
# Subgraphs that may stay original, by case, with the reason. At most one case in twenty.
EXPECTED_FALLBACK: dict[str, str] = {}

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    gc.collect()


def converted(case: zoo.Case) -> torch.nn.Module:
    return amp_graph.convert(case.make(), policy="bfloat16")


def fallbacks(plan: Plan, where: str = "graph") -> list[str]:
    own = [f"{where}: {plan.fallback}"] if plan.fallback else []
    return own + [f for name, body in plan.bodies.items() for f in fallbacks(body, name)]


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first, second)


def test_zoo_is_wide_enough() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 40
    assert set(EXPECTED_FALLBACK) <= set(names)
    assert len(EXPECTED_FALLBACK) <= len(names) / 20


@each_case
def test_precision(case: zoo.Case) -> None:
    """Low precision where it pays, everything converted, errors no larger than autocast's."""
    model = converted(case)
    step(case, model, seed=0)
    with MatmulCounter() as seen:
        step(case, model, seed=1)
    assert seen.low_share >= LOW_SHARE, f"in float32: {seen.high_calls()}"

    left = [f for plan in amp_graph.plans(model) for f in fallbacks(plan)]
    assert not left or case.name in EXPECTED_FALLBACK, left

    reference = steps(case, case.make(), BATCHES)
    ours = errors(reference, steps(case, with_buffers_of(case, model), BATCHES))
    theirs = errors(reference, steps(case, case.make(), BATCHES, around=autocast))
    for name in ("outputs", "gradient"):
        found = ratio(ours.typical(name), theirs.typical(name))
        assert found <= ALLOWED_RATIO, f"error of {name} is {found:.2f} times autocast's"
    assert excess(ours.loss, theirs.loss, ALLOWED_RATIO) < 3.5


def with_buffers_of(case: zoo.Case, model: torch.nn.Module) -> torch.nn.Module:
    model.load_state_dict(case.make().state_dict())
    return model


@each_case
def test_behaves_like_the_model(case: zoo.Case) -> None:
    """train, eval, a second shape, copies, pickles, and the way back."""
    plain, model = case.make(), case.make()
    attributes, keys = set(vars(model)), list(model.state_dict())
    amp_graph.convert(model, policy="bfloat16")
    assert list(model.state_dict()) == keys

    clone = copy.deepcopy(model)
    assert amp_graph.is_converted(clone)
    first, cloned = step(case, model, seed=0), step(case, clone, seed=0)
    assert same(first.outputs, cloned.outputs)
    assert same(first.gradient, cloned.gradient)
    learn(clone)
    model.load_state_dict(plain.state_dict())
    clone.load_state_dict({**plain.state_dict(), **dict(clone.named_parameters())})
    assert same(step(case, model, seed=0).gradient, first.gradient)
    assert not same(step(case, clone, seed=0).gradient, first.gradient)

    larger = step(case, model, seed=1, size=1)
    model.eval()
    with MatmulCounter() as seen, torch.no_grad():
        args, kwargs = case.batch(2, 0)
        case.loss(model(*args, **kwargs))
    assert seen.low_share >= LOW_SHARE, f"eval in float32: {seen.high_calls()}"
    model.train()

    loaded = pickle.loads(pickle.dumps(model))
    assert not amp_graph.is_converted(loaded)
    assert type(loaded) is type(plain)

    amp_graph.restore(model)
    assert not amp_graph.is_converted(model)
    assert set(vars(model)) == attributes
    for back in (model, loaded):
        back.load_state_dict(plain.state_dict())
    fresh = [step(case, m, seed=1, size=1) for m in (plain, model, loaded)]
    for again in fresh[1:]:
        assert same(again.outputs, fresh[0].outputs)
        assert same(again.gradient, fresh[0].gradient)
    assert larger.loss.isclose(fresh[0].loss, rtol=0.3)


def learn(model: torch.nn.Module) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-6), alpha=0.1)
