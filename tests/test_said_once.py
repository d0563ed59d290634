"""Models that warn or log from their forward: what is said once does not end a graph."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import logging
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.variables.builder import VariableBuilder
from training import assert_same_gradients
from two_layers import Loop, Speaking, Two, X

import amp_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Old(DeprecationWarning):
    pass


@functools.cache
def tell_once(self: logging.Logger, *args: object) -> None:
    self.warning(*args)


class Block(Speaking):
    def speak(self, hidden: Tensor) -> None:
        warnings.warn(f"{hidden.shape[-1]} features", stacklevel=1)
        self.leave()  # the place of the second warning

    def leave(self) -> None:
        warnings.warn("an old way", category=Old, stacklevel=2)


@contextlib.contextmanager
def shown(action: str = "default") -> Iterator[list[tuple[str, type, str]]]:
    """What is shown of the model's, each with the line of its place."""
    globals().get("__warningregistry__", {}).clear()
    found: list[tuple[str, type, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings(action, module=__name__)  # type: ignore[arg-type]
        yield found
    for w in caught:
        if w.filename == __file__ and w.category is not amp_graph.ConversionWarning:
            found.append(
                (str(w.message), w.category, linecache.getline(__file__, w.lineno).strip())
            )


EACH = [
    ("16 features", UserWarning, 'warnings.warn(f"{hidden.shape[-1]} features", stacklevel=1)'),
    ("an old way", Old, "self.leave()  # the place of the second warning"),
]


def test_what_is_shown_once_is_no_break() -> None:
    plain = Loop(Block)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with shown() as by_plain:
        plain(X).sum().backward()
    with shown() as by_model:
        for _ in range(3):
            model.zero_grad()
            model(X).sum().backward()
    assert by_plain == by_model == EACH
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None
    assert_same_gradients(model, plain, 0.05)
    assert id(warnings.warn) not in VariableBuilder._id_dispatch()


@pytest.mark.parametrize("action", ["ignore", "always"])
def test_as_often_as_by_the_plain_model(action: str) -> None:
    plain = Loop(Block)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for _ in range(2):
        counts = []
        for each in (plain, model):
            with shown(action) as found:
                each(X)
            counts.append(found)
        assert counts[0] == counts[1]
        assert len(counts[0]) == (6 if action == "always" else 0)


def test_filters_that_change_are_followed() -> None:
    plain = Loop(Block)
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    for action, count in (("ignore", 0), ("default", 2), ("ignore", 0), ("always", 6)):
        for each in (plain, model):
            with shown(action) as found:
                each(X)
            assert len(found) == count, action
    for each in (plain, model):
        with shown("error"), pytest.raises(UserWarning, match="16 features"):
            each(X)


def test_filters_that_come_and_go_capture_nothing_anew() -> None:
    model = amp_graph.convert(Loop(Block), policy="bfloat16")
    for _ in range(3):
        with shown():
            model(X)
        with shown("ignore"):
            model(X)
    assert len(amp_graph.plans(model)) == 1


def test_a_function_put_in_its_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by scripts that want no warnings at all."""
    said = []
    monkeypatch.setattr(warnings, "warn", lambda text, *args, **kwargs: said.append(text))
    model = amp_graph.convert(Loop(Block), policy="bfloat16")
    with shown() as found:
        model(X)
        model(X)
    texts = ["16 features", "an old way"]
    assert not found and [text for text in said if text in texts] == texts * 6  # PyTorch warns, too


class Catches(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with warnings.catch_warnings(action="ignore"):
            warnings.warn("not shown", stacklevel=1)
            hidden = hidden + 1
        return self.b(hidden)


def test_a_model_that_silences_itself_is_silent() -> None:
    plain = Catches()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    with shown() as found:
        for _ in range(2):
            torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
    assert not found


def test_a_text_that_depends_on_data_is_shown_each_time() -> None:
    class Tells(Two):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            warnings.warn(f"sum {x.sum().item():.0f}", stacklevel=1)
            return self.b(hidden)

    model = amp_graph.convert(Tells(), policy="bfloat16")
    with shown() as found:
        for i in range(3):
            model(torch.full((1, 8), float(i)))
    assert [text for text, *_ in found] == ["sum 0", "sum 8", "sum 16"]


def test_a_transformer_with_masks_of_two_kinds_is_one_graph() -> None:
    """As in PyTorch's tutorial on translation."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
            result: Tensor = self.transformer(
                x, y, tgt_mask=causal, src_key_padding_mask=padding, tgt_key_padding_mask=padding
            )
            return result

    x, y, padding = torch.randn(2, 6, 16), torch.randn(2, 6, 16), torch.zeros(2, 6).bool()
    padding[1, 4:] = True
    model = Translator()
    with pytest.warns(UserWarning, match="Support for mismatched"):
        expected = model(x, y, padding)
    amp_graph.convert(model, policy="bfloat16")
    torch.testing.assert_close(model(x, y, padding), expected, rtol=0.05, atol=0.05)
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None


def test_tools_look_at_the_same_graph() -> None:
    with shown("default") as found:
        assert amp_graph.compare(Loop(Block), X, policy="bfloat16").outputs < 0.05
    assert [text for text, *_ in found] == [text for text, *_ in EACH]


def test_a_logger_that_remembers_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Remembers(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                log.tell_once("a %s part", type(block).__name__)  # type: ignore[attr-defined]
                x = torch.relu(block.a(x)) @ block.b.weight.T
            return x

    monkeypatch.setattr(logging.Logger, "tell_once", tell_once, raising=False)
    log = logging.getLogger(__name__)
    model = amp_graph.convert(Remembers(Block), policy="bfloat16")
    for _ in range(2):
        model(X).sum().backward()
    said = [record.getMessage() for record in caplog.records if record.name == __name__]
    assert said == ["a Block part"]
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None


def test_so_does_that_of_transformers() -> None:
    """It tells that gradient checkpointing needs no cache."""
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.train()
    amp_graph.convert(model, policy="bfloat16")
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None and len(plan.bodies) == 2


def test_a_function_that_a_logger_was_given_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Notes(Two):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            log.note("between")  # type: ignore[attr-defined]
            return self.b(x)

    log, noted = logging.getLogger(__name__), []
    monkeypatch.setattr(log, "note", lambda text: noted.append(text), raising=False)
    model = amp_graph.convert(Notes(), policy="bfloat16")
    model(X)
    model(X)
    assert noted == ["between"] * 2
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None, None]


@torch.library.custom_op("said_once::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    return (x.sum(1) > 0).nonzero().flatten()


@kept.register_fake
def _(x: Tensor) -> Tensor:
    warnings.warn("an old way to tell of sizes", FutureWarning, stacklevel=1)
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


class Keeps(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x[kept(self.a(x).detach())])


def test_what_tells_of_shapes_warns_of_nothing() -> None:
    """As that of `torchvision.ops.nms`, which is asked only because the model is captured."""
    model = amp_graph.convert(Keeps(), policy="bfloat16")
    with shown("error") as found:
        model(X)
    assert not found
    (plan,) = amp_graph.plans(model)
    assert plan.fallback is None


@functools.cache
def is_doubled(self: logging.Logger, what: str) -> bool:
    return what == "doubled"


ASKED = logging.getLogger("asked")


class AsksItsLogger(Two):
    """By a method that remembers, for what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.a(x))
        return hidden * 2 if ASKED.is_doubled("doubled") else hidden  # type: ignore[attr-defined]


def test_what_a_logger_is_asked_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "is_doubled", is_doubled, raising=False)
    plain = AsksItsLogger()
    model = amp_graph.convert(copy.deepcopy(plain), policy="bfloat16")
    torch.testing.assert_close(model(X), plain(X), rtol=0.05, atol=0.05)
