"""Models that log from their forward: what nobody hears does not end a graph."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor
from torch._dynamo import funcname_cache
from training import assert_same_gradients
from two_layers import Loop, Speaking, Two, X

import amp_graph
from amp_graph.dynamo_changes.logs import UnheardLogs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

log = logging.getLogger(__name__)


class Block(Speaking):
    def speak(self, hidden: Tensor) -> None:
        log.debug("hidden: %s, peak %s", hidden.shape, hidden.abs().max())
        log.info("in a block")


def heard(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == log.name]


def test_what_is_not_heard_is_no_break(caplog: pytest.LogCaptureFixture) -> None:
    plain, x = Loop(Block), X.clone()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with caplog.at_level(logging.WARNING, __name__):
        for each in (plain, model):
            each(x).sum().backward()
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and not heard(caplog)
    assert_same_gradients(model, plain, 0.05)
    assert type(copy.deepcopy(UnheardLogs())) is set  # as Dynamo does with its settings


def test_heard_once_the_level_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    plain = Loop(Block)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    levels = {}
    for level in (logging.WARNING, logging.INFO, logging.DEBUG, logging.WARNING):
        for each in (plain, model):
            caplog.clear()
            with caplog.at_level(level, __name__):
                each(X)
            levels[each] = [record.levelno for record in heard(caplog)]
        assert levels[model] == levels[plain]
    assert len(amp_graph.plans(model)) > 1


def test_handlers_of_a_user_get_what_they_got(caplog: pytest.LogCaptureFixture) -> None:
    model = amp_graph.convert(Loop(Block), policy="bfloat16")
    with caplog.at_level(logging.DEBUG, __name__):
        model(X)
    assert [record.levelname for record in heard(caplog)] == ["DEBUG", "INFO"] * 3
    assert heard(caplog)[0].getMessage().startswith("hidden: torch.Size([4, 16]), peak")


def test_a_subclass_that_does_more_is_called() -> None:
    class Counts(logging.Logger):
        count = 0

        def debug(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            Counts.count += 1

    class Model(Two):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            counts.debug("called")
            return self.b(x)

    counts = Counts("counts", logging.WARNING)
    model = amp_graph.convert(Model(), policy="bfloat16")
    model(X)
    model(X)
    assert Counts.count == 2


def test_the_users_own_setting_holds(caplog: pytest.LogCaptureFixture) -> None:
    model = amp_graph.convert(Loop(Block), policy="bfloat16")
    ignored = {logging.Logger.debug, logging.Logger.info}
    with (
        caplog.at_level(logging.DEBUG, __name__),
        dynamo_config.patch(ignore_logging_functions=ignored),
    ):
        model(X)
        assert dynamo_config.ignore_logging_functions is ignored
    assert len(amp_graph.plans(model)) == 1 and not heard(caplog)


@pytest.mark.parametrize("tool", ["compare", "find_nonfinite"])
def test_tools_look_at_the_same_graph(tool: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, __name__):
        found = getattr(amp_graph, tool)(Loop(Block), X, policy="bfloat16")
    if tool == "compare":
        assert found.outputs < 0.05
    else:
        assert found is None


def test_files_are_taken_apart_for_a_log_that_tells_functions_alone() -> None:
    file = Speaking.forward.__code__.co_filename
    funcname_cache.clearcache()
    amp_graph.convert(Block())(X)
    assert file not in funcname_cache.cache
    torch._logging.set_logs(trace_call=True)
    try:
        amp_graph.convert(Loop(Block))(X)
    finally:
        torch._logging.set_logs()
    assert "Speaking.forward" in funcname_cache.cache[file].values()
