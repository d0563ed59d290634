"""Language models: decoders, encoders, encoder-decoders, mixtures of experts, state space."""

from __future__ import annotations

from .case import Case
from .pretrained import (
    ENCODER_DECODER,
    TEXT,
    VOCAB,
    Row,
    causal,
    causal_padded,
    classified_text,
    masked,
    rows_to_cases,
    sequence_pair,
    unlabelled_text,
)

GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

# fmt: off
DECODERS: list[Row] = [
    ("gpt2", "GPT2LMHeadModel", causal, TEXT),
    ("gpt_neo", "GPTNeoForCausalLM", causal, {
        **TEXT, "num_layers": 2, "num_heads": 4, "window_size": 4,
        "attention_types": [[["global", "local"], 1]],
    }),
    ("gpt_neox", "GPTNeoXForCausalLM", causal, TEXT),
    ("llama", "LlamaForCausalLM", causal, GROUPED),
    ("mistral", "MistralForCausalLM", causal_padded, {**GROUPED, "sliding_window": 4}),
    ("gemma2", "Gemma2ForCausalLM", causal, {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    ("qwen2", "Qwen2ForCausalLM", causal, GROUPED),
    ("phi", "PhiForCausalLM", causal, TEXT),
    ("opt", "OPTForCausalLM", causal_padded, {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("bloom", "BloomForCausalLM", causal_padded, TEXT),
    ("falcon", "FalconForCausalLM", causal, TEXT),
    ("mpt", "MptForCausalLM", causal, {**TEXT, "max_seq_len": 64}),
    ("stablelm", "StableLmForCausalLM", causal, GROUPED),
    ("llama_classifier", "LlamaForSequenceClassification", classified_text, GROUPED),
]

EXPERT_MIXTURES: list[Row] = [
    ("mixtral", "MixtralForCausalLM", causal, {**EXPERTS, "num_local_experts": 4}),
    ("qwen2_moe", "Qwen2MoeForCausalLM", causal, {
        **EXPERTS, "num_experts": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }),
    ("switch", "SwitchTransformersForConditionalGeneration", sequence_pair, {
        **T5, "num_layers": 1, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "num_experts": 2, "router_jitter_noise": 0.0,
        "expert_capacity": 16,
    }),
]

STATE_SPACE: list[Row] = [
    ("mamba", "MambaForCausalLM", causal, {**TEXT, "state_size": 8}),
    ("mamba2", "Mamba2ForCausalLM", causal, {
        **TEXT, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4,
    }),
    ("recurrent_gemma", "RecurrentGemmaForCausalLM", causal, {
        **GROUPED, "lru_width": 32, "attention_window_size": 4,
        "block_types": ["recurrent", "attention"],
    }),
]

ENCODERS: list[Row] = [
    ("bert", "BertForMaskedLM", masked, TEXT),
    ("bert_eager", "BertForSequenceClassification", classified_text,
     {**TEXT, "attn_implementation": "eager"}),
    ("albert", "AlbertForMaskedLM", masked, {**TEXT, "embedding_size": 16}),
    ("distilbert", "DistilBertForMaskedLM", masked,
     {**TEXT, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    ("electra", "ElectraForSequenceClassification", classified_text,
     {**TEXT, "embedding_size": 16}),
    ("deberta_v2", "DebertaV2ForMaskedLM", masked, {
        **TEXT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm", "share_att_key": True,
    }),
    ("mpnet", "MPNetForMaskedLM", masked, TEXT),
    ("convbert", "ConvBertForMaskedLM", masked, {**TEXT, "embedding_size": 32}),
    ("funnel", "FunnelForMaskedLM", masked, {
        "vocab_size": VOCAB, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
        "block_sizes": [1, 1], "num_decoder_layers": 1,
    }),
    ("fnet", "FNetForMaskedLM", causal, TEXT),
    ("xlnet", "XLNetForSequenceClassification", classified_text,
     {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    ("modernbert", "ModernBertForMaskedLM", masked,
     {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    ("longformer", "LongformerForMaskedLM", masked,
     {**TEXT, "attention_window": 4, "pad_token_id": 1}),
    ("dpr", "DPRQuestionEncoder", unlabelled_text, TEXT),
]

ENCODER_DECODERS: list[Row] = [
    ("t5", "T5ForConditionalGeneration", sequence_pair, T5),
    ("mt5", "MT5ForConditionalGeneration", sequence_pair,
     {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("bart", "BartForConditionalGeneration", sequence_pair, ENCODER_DECODER),
    ("led", "LEDForConditionalGeneration", sequence_pair, {
        **ENCODER_DECODER, "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    }),
]
# fmt: on


def cases() -> list[Case]:
    return [
        *rows_to_cases("decoder", DECODERS),
        *rows_to_cases("mixture of experts", EXPERT_MIXTURES),
        *rows_to_cases("state space", STATE_SPACE),
        *rows_to_cases("encoder", ENCODERS),
        *rows_to_cases("encoder-decoder", ENCODER_DECODERS),
    ]
