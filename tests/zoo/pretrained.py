"""Cases from `transformers`: tables of (name, model class, inputs, overrides), random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import Batch, Case, distance_loss, generator, own_loss, seeded

VOCAB = 99
Row = tuple[str, str, Callable[[int, int], Batch], dict[str, Any]]

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}


def still(config: Any) -> None:
    """Take the randomness out of a configuration and its parts, and make weights matter.

    The usual initial deviation of 0.02 suits wide models; at width 32 it leaves every layer
    but the embedding without influence on the loss.
    """
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            still(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    # Found out by a classifier at its first forward otherwise, which recompiles the second.
    config.problem_type = "single_label_classification"
    for key in ("initializer_range", "init_std"):
        if isinstance(getattr(config, key, None), float):
            setattr(config, key, 0.15)


def from_config(name: str, model: str, overrides: dict[str, Any]) -> nn.Module:
    import transformers

    model_class = getattr(transformers, model)
    config = model_class.config_class(**overrides)
    still(config)
    return seeded(name, partial(model_class, config))


def rows_to_cases(family: str, rows: Iterable[Row]) -> list[Case]:
    def case(name: str, model: str, batch: Callable[[int, int], Batch], over: dict) -> Case:
        loss = own_loss if batch(0, 0)[1].keys() & {"labels", "return_loss"} else distance_loss
        return Case(name, family, partial(from_config, name, model, over), batch, loss)

    return [case(*row) for row in rows]


# Two layers that differ, share weights, or hand on more than a hidden state; one of each family.
DEEP = frozenset(
    """
    gpt2 gpt_neo llama gemma2 recurrent_gemma bert albert deberta_v2 modernbert t5 vit wav2vec2 clip
    """.split()
)
LAYERS = "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers".split()


def shallow(case: Case) -> Case:
    """With one layer in place of two alike, unless it is in DEEP: half as much to capture."""
    build = case.make
    if case.name in DEEP or not isinstance(build, partial) or build.func is not from_config:
        return case
    name, model, overrides = build.args
    return replace(case, make=partial(from_config, name, model, with_one_layer(overrides)))


def with_one_layer(overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        key: with_one_layer(value)
        if isinstance(value, dict)
        else 1
        if key in LAYERS and value == 2
        else value
        for key, value in overrides.items()
    }


def shape(size: int, length: int = 10) -> tuple[int, int]:
    """(batch, tokens)."""
    return (2, length) if size == 0 else (3, length + 6)


def token_ids(seed: int, dims: tuple[int, ...]) -> torch.Tensor:
    """Random tokens, the first few identifiers left to the special ones."""
    return torch.randint(5, VOCAB, dims, generator=generator(seed))


def padding_mask(ids: torch.Tensor) -> torch.Tensor:
    """The last two tokens of the last sequence are padding."""
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return mask


def causal(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    return (), {"input_ids": ids, "labels": ids}


def causal_padded(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    return (), {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": ids}


def masked(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    labels = token_ids(seed + 1000, shape(size))
    return (), {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": labels}


def classified_text(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    labels = torch.randint(0, 2, (len(ids),), generator=generator(seed + 1000))
    return (), {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": labels}


def unlabelled_text(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    return (), {"input_ids": ids, "attention_mask": padding_mask(ids)}


def sequence_pair(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    labels = token_ids(seed + 1000, shape(size, 7))
    return (), {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": labels}


def images(seed: int, size: int, side: int = 32, count: int = 2) -> torch.Tensor:
    return torch.randn(count + size, 3, side, side, generator=generator(seed))


def image(seed: int, size: int) -> Batch:
    return (), {"pixel_values": images(seed, size)}


def classified_image(seed: int, size: int, side: int = 32, count: int = 2) -> Batch:
    pixels = images(seed, size, side, count)
    labels = torch.randint(0, 3, (len(pixels),), generator=generator(seed + 1000))
    return (), {"pixel_values": pixels, "labels": labels}


def many_classified_images(seed: int, size: int) -> Batch:
    """Enough of them that batch norm's statistics do not hang on single pixels."""
    return classified_image(seed, size, side=48, count=8)


def waveform(seed: int, size: int) -> Batch:
    length = 800 if size == 0 else 1120
    return (), {"input_values": torch.randn(2 + size, length, generator=generator(seed))}
