"""Cases of all architectures that the installed `transformers` has for a task, beside those of the
zoo: a small configuration of each is guessed by the names that most of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import Batch, Case, own_loss, seeded
from .pretrained import VOCAB, causal, classified_image, classified_text, masked, still

# Names of `transformers.models.auto.modeling_auto`: classes by type of model.
TASKS: dict[str, tuple[str, Callable[[int, int], Batch]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", causal),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", masked),
    "texts": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", classified_text),
    "images": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", partial(classified_image, count=8)),
}
LARGEST = 30e6  # parameters
NUMBERS = {
    VOCAB: "vocab_size",
    2: "num_hidden_layers num_layers n_layer n_layers num_encoder_layers num_decoder_layers "
    "encoder_layers decoder_layers num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads mamba_n_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts",
    8: "head_dim d_kv state_size mamba_d_state kv_lora_rank qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim patch_size",
    16: "q_lora_rank moe_intermediate_size shared_expert_intermediate_size mamba_d_head",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size attention_hidden_size image_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim",
    64: "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
    3: "num_channels num_labels",
    1: "bos_token_id decoder_start_token_id n_group topk_group mamba_n_groups "
    "first_k_dense_replace",
    0: "pad_token_id",
}
SMALL = {name: number for number, names in NUMBERS.items() for name in names.split()}
SMALL |= {"eos_token_id": 2, "use_cache": False}
UNSET = {"num_key_value_heads", "head_dim", "pad_token_id"}  # to be set where they are None


def cases(task: str) -> list[Case]:
    """The architectures of a task. Of some the configuration does not fit: they raise as they are
    made or called."""
    import transformers
    from transformers.models.auto import modeling_auto

    table, batch = TASKS[task]
    given = getattr(modeling_auto, table).values()
    names = dict.fromkeys(name if isinstance(name, str) else name[0] for name in given)
    there = [name for name in names if hasattr(transformers, name)]
    return [Case(name, task, partial(_made, name), batch, own_loss) for name in there]


def _made(name: str) -> nn.Module:
    import transformers

    model_class = getattr(transformers, name)
    config = _small(model_class.config_class)
    still(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    return seeded(name, partial(model_class, config))


def _small(config_class: Any) -> Any:
    """Return a configuration with small numbers, and small configurations of its parts, if it takes
    these."""
    usual = config_class()
    own = {name: n for name, n in SMALL.items() if _is_number(usual, name)}
    parts = {name: type(getattr(usual, name)) for name in getattr(usual, "sub_configs", ())}
    try:
        return config_class(**own, **{name: _small(kind) for name, kind in parts.items()})
    except Exception:
        return config_class(**own)


def _is_number(config: Any, name: str) -> bool:
    value = getattr(config, name, "")
    return isinstance(value, int) or (value is None and name in UNSET)
