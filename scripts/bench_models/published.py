"""Models of transformers, built from configuration, as people take them; each returns its loss.

Those that are named as in their papers have the published size on a CPU as well, and other batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench_models.workload import Workload

CLASSES = 1000
LABELLED: dict[str, Any] = {"num_labels": CLASSES}


def llama(device: str, large: bool) -> Workload:
    """Rotary positions, RMS norms, gated layers, fewer key heads than query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder(LlamaForCausalLM(LlamaConfig(**_sizes(large))), device, large)


def llama_masked(device: str, large: bool) -> Workload:
    """The same on longer sequences, with the attention mask that data collators give, all ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_sizes(large)))
    return _decoder(model, device, large, (4, 2048) if large else (2, 256), is_masked=True)


def mixtral(device: str, large: bool) -> Workload:
    """The same with two of several experts for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = 8 if large else 4
    config = MixtralConfig(**_sizes(large), num_local_experts=experts, num_experts_per_tok=2)
    return _decoder(MixtralForCausalLM(config), device, large)


def vit(device: str, large: bool) -> Workload:
    """ViT-B/16, or a small one."""
    from transformers import ViTConfig, ViTForImageClassification

    if large:
        return vit_base(device, large)
    sizes: dict[str, Any] = {"image_size": 64, "patch_size": 8, "num_hidden_layers": 4}
    sizes |= {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(**sizes, **LABELLED))
    return _classifier(model, device, 8, 64)


def vit_base(device: str, large: bool) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**LABELLED))
    return _classifier(model, device, 64 if large else 4)


def resnet_50(device: str, large: bool) -> Workload:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(**LABELLED))
    return _classifier(model, device, 128 if large else 4)


def convnext_tiny(device: str, large: bool) -> Workload:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    model = ConvNextForImageClassification(ConvNextConfig(**LABELLED))
    return _classifier(model, device, 128 if large else 4)


def gpt2(device: str, large: bool) -> Workload:
    """With dropout, also of attention weights, which kernels of the CPU for attention lack."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return _decoder(model, device, large, (8, 1024) if large else (2, 256))


def bert_base(device: str, large: bool) -> Workload:
    """With dropout, as GPT-2, and its head for classes of texts, which are padded to several
    lengths."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig())
    batch, length = (32, 512) if large else (8, 128)
    ids = torch.randint(0, 30000, (batch, length), device=device)
    lengths = torch.linspace(length // 2, length, batch, device=device).unsqueeze(1)
    mask = (torch.arange(length, device=device) < lengths).long()
    labels = torch.randint(0, 2, (batch,), device=device)

    def loss(m: nn.Module) -> torch.Tensor:
        return m(ids, attention_mask=mask, labels=labels).loss

    return Workload(model, loss)


def _classifier(model: nn.Module, device: str, batch: int, size: int = 224) -> Workload:
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, CLASSES, (batch,), device=device)

    def loss(m: nn.Module) -> torch.Tensor:
        return m(images, labels=labels).loss

    return Workload(model, loss)


def _sizes(large: bool) -> dict[str, Any]:
    width, depth, heads, vocabulary = (1024, 8, 16, 32000) if large else (256, 4, 4, 1000)
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "use_cache": False,
    }


def _decoder(
    model: nn.Module,
    device: str,
    large: bool,
    shape: tuple[int, int] | None = None,
    is_masked: bool = False,
) -> Workload:
    shape = shape or ((8, 512) if large else (4, 128))
    ids = torch.randint(0, 32000 if large else 1000, shape, device=device)
    given = {"attention_mask": torch.ones_like(ids)} if is_masked else {}

    def loss(m: nn.Module) -> torch.Tensor:
        return m(ids, labels=ids, **given).loss

    return Workload(model, loss)
