"""Attention that PyTorch would compute in float32 inside is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from attention_operands import E, L, S, bool_mask, float_mask, operands
from counting import MatmulCounter
from graphs import BFLOAT16, Rewritten, rewritten
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import amp_graph
from amp_graph.capture.retrace import trace
from amp_graph.graphs.attention import ATTENTION, widens

whole = nn.functional.scaled_dot_product_attention
BALANCED = amp_graph.Policy("bfloat16")
OVERRIDE = [amp_graph.Override(color="deny", op=ATTENTION.name().replace("::", "."))]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rewrite_call(*args: torch.Tensor, policy: amp_graph.Policy = BALANCED, **options) -> Rewritten:
    """Rewrite one call of attention on operands that are low already."""
    mask = options.pop("attn_mask", None)

    def function(weight: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        query, key, value, *rest = given
        return whole(query @ weight, key @ weight, value, *rest, **options)

    tensors = [torch.eye(E), *args, *([] if mask is None else [mask])]
    return rewritten(trace(function, tensors), policy)


def is_whole(result: Rewritten) -> bool:
    return [n.target for n in result.nodes(ATTENTION.name().partition("::")[2])] == [ATTENTION]


SPLIT = {
    "mask with gradient": lambda: (operands(), {"attn_mask": float_mask(2, 4, L, S)}),
    "dropout": lambda: (operands(), {"dropout_p": 0.1}),
    "broadcast key heads": lambda: (operands(key_heads=1), {}),
    "another value size": lambda: (operands(value_size=2 * E), {}),
    "three dimensions": lambda: ([t[0] for t in operands()], {}),
    "two dimensions": lambda: ([t[0, 0] for t in operands()], {}),
}
FUSED_IN_SOME_VERSIONS = ("broadcast key heads", "three dimensions")  # 2.15, not 2.13
WHOLE = {
    "plain": lambda: (operands(), {}),
    "causal": lambda: (operands(), {"is_causal": True}),
    "mask": lambda: (operands(), {"attn_mask": float_mask(2, 4, L, S, requires_grad=False)}),
    "bool mask": lambda: (operands(), {"attn_mask": bool_mask(L, S)}),
    "grouped heads": lambda: (operands(key_heads=2), {"enable_gqa": True}),
}


@pytest.mark.parametrize("call", SPLIT)
def test_what_takes_the_math_kernel_is_split(call: str) -> None:
    args, options = SPLIT[call]()
    result = rewrite_call(*args, **options)
    with MatmulCounter() as seen:
        whole(*(t.bfloat16() for t in args), **options)
    fused = any("flash" in name for name, _ in seen.forward)
    assert is_whole(result) is fused
    if fused:
        assert call in FUSED_IN_SOME_VERSIONS
        return
    products = [n.name for n in result.nodes("matmul")]
    assert len(products) == 4 and all(result.is_low(name) for name in products)
    parts = [f for f in result.plan.facts.values() if f.name.startswith("scaled_dot_product")]
    assert {f.op for f in parts} >= {"aten.matmul.default", "aten.transpose.int"}


@pytest.mark.parametrize("call", WHOLE)
def test_what_takes_a_fused_kernel_stays_whole(call: str) -> None:
    args, options = WHOLE[call]()
    result = rewrite_call(*args, **options)
    assert is_whole(result) and result.is_low("scaled_dot_product_attention")


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "heads next to each other": lambda t: _apart(t, max(-3, -t.dim())),
    "numbers of a head apart": lambda t: _apart(t, -1),
}


def _apart(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return tensor.transpose(-2, dimension).contiguous().transpose(-2, dimension)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", SPLIT | WHOLE)
def test_the_kernel_asked_for_is_the_kernel_taken(call: str, layout: str, device: str) -> None:
    args, options = (SPLIT | WHOLE)[call]()
    given = [LAYOUTS[layout](t.to(device)) for t in args]
    mask = options.pop("attn_mask", None)
    if mask is not None:
        mask = mask.to(device)
        given.append(mask)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return whole(*tensors, **options)

    taken = torch._fused_sdp_choice(
        *(t if t.dtype is torch.bool else t.half() for t in given), **options
    )
    noted = [widens(n) for n in trace(function, given).graph.nodes if n.target is ATTENTION]
    assert noted == [taken == SDPBackend.MATH.value]


def test_without_gradients_a_mask_takes_a_fused_kernel() -> None:
    mask = float_mask(2, 4, L, S)
    with torch.no_grad():
        assert is_whole(rewrite_call(*operands(), attn_mask=mask * 2))


def test_nothing_is_split_at_level_safe() -> None:
    """Scores beyond float16's range are finite in the math kernel, as under autocast."""
    assert is_whole(rewrite_call(*operands(), dropout_p=0.5, policy=BFLOAT16))


def test_kernels_that_the_user_disabled_do_not_count() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert not is_whole(rewrite_call(*operands()))
    no_kernel = pytest.raises(RuntimeError, match="No available kernel")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), no_kernel:
        rewrite_call(*operands(), dropout_p=0.1)


@pytest.fixture
def reduced_in_low() -> Iterator[None]:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def test_a_math_kernel_told_to_stay_low_stays_whole(reduced_in_low: None) -> None:
    assert is_whole(rewrite_call(*operands(), dropout_p=0.1))


def test_what_is_to_stay_in_float32_stays_whole() -> None:
    by_operator = amp_graph.Policy("bfloat16", overrides=OVERRIDE)
    result = rewrite_call(*operands(), dropout_p=0.1, policy=by_operator)
    assert is_whole(result) and not result.is_low("scaled_dot_product_attention")
    half = [t.detach().half() for t in operands()]
    assert is_whole(rewritten(trace(lambda *t: whole(*t, dropout_p=0.1), half)))


def only_math() -> AbstractContextManager[None]:
    """As before there was `sdpa_kernel`."""
    return torch.backends.cuda.sdp_kernel(
        enable_flash=False, enable_mem_efficient=False, enable_cudnn=False
    )


CHOICES = {"sdpa_kernel": partial(sdpa_kernel, SDPBackend.MATH), "sdp_kernel": only_math}


@pytest.mark.filterwarnings("ignore:.*sdp_kernel.. is deprecated:FutureWarning")
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
def test_a_choice_of_kernels_in_the_model_is_kept(
    choice: Callable[[], AbstractContextManager[None]], reduced_in_low: None
) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(E))

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            query, key, value = given
            with choice():
                scores = whole(query @ self.weight, key @ self.weight, value)
            return whole(scores, key, value)

    model = amp_graph.convert(Chosen(), policy="bfloat16")
    with MatmulCounter() as seen:
        model(*operands())
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None]
    assert seen.low_share == 1 and seen.forward["bmm", torch.bfloat16] == 2
    assert sum("flash" in name for name, _ in seen.forward) == 1
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()


@pytest.mark.filterwarnings("ignore:.*sdp_kernel.. is deprecated:FutureWarning")
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
def test_kernels_are_put_back_that_were_enabled_before_a_call(
    choice: Callable[[], AbstractContextManager[None]], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(torch.backends.cuda.enable_flash_sdp, True))

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(E))

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            with choice():
                return whole(query @ self.weight, query, query)

    model = amp_graph.convert(Chosen(), policy="bfloat16")
    for is_enabled in (True, False, True):
        torch.backends.cuda.enable_flash_sdp(is_enabled)
        model(operands()[0])
        assert torch.backends.cuda.flash_sdp_enabled() is is_enabled


class Attention(nn.Module):
    """Attention with a learned bias, as in T5, BEiT and Swin."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(E, 3 * E)
        self.bias = nn.Embedding(32, 1)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        where = torch.arange(x.shape[1])
        bias = self.bias((where[:, None] - where).abs()).squeeze(-1)
        return whole(query, key, value, bias, dropout_p=self.dropout).squeeze(1)


def test_a_model_trains_split_and_evaluates_whole() -> None:
    model = amp_graph.convert(Attention(), policy="bfloat16")
    for length in (6, 9, 11):  # from the second on, the length is symbolic
        x = torch.randn(2, length, E)
        model(x)
        with MatmulCounter() as seen:
            model(x).sum().backward()
        assert seen.forward == {("addmm", torch.bfloat16): 1, ("bmm", torch.bfloat16): 2}
        assert seen.backward_low_share == 1
        assert model.bias.weight.grad.abs().max() > 0
    assert [plan.fallback for plan in amp_graph.plans(model)] == [None, None]
    parts = [f for f in amp_graph.plans(model)[0].facts.values() if "product_attention" in f.name]
    assert all("in forward" in f.source for f in parts)
    with torch.no_grad(), MatmulCounter() as seen:
        model(x)
        model(x)
    assert not any("bmm" in name for name, _ in seen.forward)


def test_dropout_drops_what_the_float32_model_drops() -> None:
    plain = Attention(dropout=0.5)
    model = amp_graph.convert(Attention(dropout=0.5), policy="bfloat16")
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 6, E)
    for seed in range(5):
        torch.manual_seed(seed)
        expected = plain(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(model(x), expected, rtol=0.03, atol=0.03)
