"""The models of the benchmark, in the styles that people train: from plain torch.nn, and some of
transformers.

Each comes in two sizes: for two CPU cores, and for one large GPU, where it has the published
configuration. Those named as in their papers have it on both. None has dropout, so that gradients
can be compared, but GPT-2 and BERT-base.
"""

from __future__ import annotations

import torch

from bench_models import images, others, published, sequences, vision
from bench_models.workload import Factory, Workload

__all__ = ["WORKLOADS", "Workload", "workload_of"]

WORKLOADS: dict[str, Factory] = {
    "mlp": others.mlp,
    "gpt compute-bound": sequences.gpt_compute_bound,
    "gpt launch-bound": sequences.gpt_launch_bound,
    "gpt explicit attention": sequences.gpt_explicit_attention,
    "gpt spelled out": sequences.gpt_spelled_out,
    "bert": sequences.bert,
    "resnet": vision.resnet,
    "resnext": vision.resnext,
    "unet": images.unet,
    "seq2seq lstm": sequences.seq2seq,
    "ncf": others.ncf,
    "ssd": vision.ssd,
    "waveglow": others.waveglow,
    "dcgan": images.dcgan,
    "llama": published.llama,
    "llama with a mask": published.llama_masked,
    "mixtral": published.mixtral,
    "vit": published.vit,
    "ResNet-50": published.resnet_50,
    "ConvNeXt-T": published.convnext_tiny,
    "ViT-B/16": published.vit_base,
    "BERT-base": published.bert_base,
    "GPT-2": published.gpt2,
}


def workload_of(name: str, device: str, large: bool) -> Workload:
    """Of one model, made on the device: to make a large one elsewhere takes many seconds."""
    with torch.device(device):
        return WORKLOADS[name](device, large)
