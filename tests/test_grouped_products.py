"""Products of a mixture of experts: by PyTorch's kernel in bfloat16, expert by expert elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from counting import Names
from transformers import MixtralConfig, MixtralForCausalLM

import amp_graph


def products(width: int, dtype: str) -> tuple[Counter[str], float]:
    """Those of a step, and how far its gradients are from those in float32, relative."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_local_experts=4, **sizes, **heads))
    ids = torch.arange(24).view(2, 12)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradients()
    policy = amp_graph.Policy(dtype, loss_scale=None)
    amp_graph.convert(model, policy=policy)
    gradients()
    with Names() as counted:
        found = gradients()
    grouped = (n.partition("_backward")[0].strip("_") for n in counted.names if "grouped_mm" in n)
    return Counter(grouped), float((found - exact).norm() / exact.norm())


def test_aligned_in_bfloat16() -> None:
    names, error = products(32, "bfloat16")
    assert names["grouped_mm"] >= 6 and not names["grouped_mm_fallback"]  # 2, and 4 of gradients
    assert error < 0.02


@pytest.mark.parametrize(("width", "dtype"), [(20, "bfloat16"), (32, "float16")])
def test_others(width: int, dtype: str) -> None:
    names, error = products(width, dtype)
    assert names["grouped_mm_fallback"] == 4 and not names["grouped_mm"]
    assert error < 0.02
