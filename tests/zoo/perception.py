"""Models of images, sound, and of text beside images."""

from __future__ import annotations

import torch

from .case import Batch, Case, generator
from .pretrained import (
    ENCODER_DECODER,
    TEXT,
    VISION,
    VOCAB,
    Row,
    classified_image,
    image,
    images,
    many_classified_images,
    padding_mask,
    rows_to_cases,
    shape,
    token_ids,
    waveform,
)

SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 3,
}
WAV2VEC2 = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (8, 4, 3),
    "conv_stride": (4, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "num_feat_extract_layers": 3,
}
TWO_TOWERS = {
    "text_config": {**TEXT, "projection_dim": 16},
    "vision_config": {**VISION, "projection_dim": 16},
    "projection_dim": 16,
}


def pixel_labels(seed: int, size: int) -> Batch:
    labels = torch.randint(0, 3, (2 + size, 32, 32), generator=generator(seed + 1000))
    return (), {"pixel_values": images(seed, size), "labels": labels}


def spoken_words(seed: int, size: int) -> Batch:
    (), kwargs = waveform(seed, size)
    return (), {**kwargs, "labels": token_ids(seed + 1000, (2 + size, 4))}


def spectrogram(seed: int, size: int) -> Batch:
    features = torch.randn(2 + size, 16, 40, generator=generator(seed))
    return (), {"input_features": features, "labels": token_ids(seed + 1000, shape(size, 6))}


def long_spectrogram(seed: int, size: int) -> Batch:
    values = torch.randn(2 + size, 64, 16, generator=generator(seed))
    labels = torch.randint(0, 2, (2 + size,), generator=generator(seed + 1000))
    return (), {"input_values": values, "labels": labels}


def captioned(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    mask = padding_mask(ids)
    pixels = images(seed, size)
    return (), {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def captioned_regions(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    g = generator(seed)
    features, boxes = (
        torch.randn(len(ids), 6, 16, generator=g),
        torch.rand(len(ids), 6, 4, generator=g),
    )
    return (), {"input_ids": ids, "visual_feats": features, "visual_pos": boxes}


def captioned_embeddings(seed: int, size: int) -> Batch:
    ids = token_ids(seed, shape(size))
    embeds = torch.randn(len(ids), 6, 16, generator=generator(seed))
    return (), {"input_ids": ids, "visual_embeds": embeds}


def captioned_contrast(seed: int, size: int) -> Batch:
    args, kwargs = captioned(seed, size)
    return args, {**kwargs, "return_loss": True}


def image_tokens(seed: int, size: int) -> Batch:
    """16 image tokens (identifier 4) before the text, as LLaVA wants them."""
    text = token_ids(seed, shape(size))
    ids = torch.cat([torch.full((len(text), 16), 4), text], dim=1)
    return (), {"input_ids": ids, "pixel_values": images(seed, size), "labels": ids}


# fmt: off
VISION_MODELS: list[Row] = [
    ("vit", "ViTForImageClassification", classified_image, {**VISION, "num_labels": 3}),
    ("beit", "BeitForImageClassification", classified_image, {
        **VISION, "num_labels": 3, "use_relative_position_bias": True,
    }),
    ("dinov2", "Dinov2ForImageClassification", classified_image, {**VISION, "num_labels": 3}),
    ("swin", "SwinForImageClassification", classified_image, SWIN),
    ("swinv2", "Swinv2ForImageClassification", classified_image, SWIN),
    ("convnext", "ConvNextForImageClassification", classified_image, {
        "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 3,
    }),
    ("resnet", "ResNetForImageClassification", many_classified_images, {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 3,
        "layer_type": "basic",
    }),
    ("regnet", "RegNetForImageClassification", many_classified_images, {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8,
        "num_labels": 3,
    }),
    ("focalnet", "FocalNetForImageClassification", classified_image, {
        "image_size": 32, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32],
        "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": 3,
    }),
    ("pvt_v2", "PvtV2ForImageClassification", classified_image, {
        "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
        "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "num_labels": 3,
    }),
    ("segformer", "SegformerForSemanticSegmentation", pixel_labels, {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3,
    }),
    ("mobilevit", "MobileViTForImageClassification", many_classified_images, {
        "image_size": 48, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8] * 6 + [16],
        "num_attention_heads": 4, "num_labels": 3, "mlp_ratio": 2.0,
    }),
    ("dpt", "DPTForDepthEstimation", image, {
        **VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "is_hybrid": False,
    }),
    ("yolos", "YolosForObjectDetection", image, {
        **VISION, "image_size": [32, 32], "num_detection_tokens": 5, "num_labels": 3,
    }),
    ("poolformer", "PoolFormerForImageClassification", classified_image, {
        "depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1], "num_encoder_blocks": 2, "num_labels": 3,
    }),
]

AUDIO_MODELS: list[Row] = [
    ("wav2vec2", "Wav2Vec2ForCTC", spoken_words, WAV2VEC2),
    ("sew", "SEWForCTC", spoken_words, {**WAV2VEC2, "squeeze_factor": 2}),
    ("wavlm", "WavLMForCTC", spoken_words, {
        **WAV2VEC2, "num_buckets": 8, "max_bucket_distance": 16,
    }),
    ("whisper", "WhisperForConditionalGeneration", spectrogram, {
        **ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 20,
        "max_target_positions": 32, "suppress_tokens": None, "begin_suppress_tokens": None,
    }),
    ("speech_to_text", "Speech2TextForConditionalGeneration", spectrogram, {
        **ENCODER_DECODER, "input_feat_per_channel": 40, "max_source_positions": 20,
        "max_target_positions": 32, "conv_channels": 16, "num_conv_layers": 2,
    }),
    ("audio_spectrogram", "ASTForAudioClassification", long_spectrogram, {
        **VISION, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 64,
        "num_mel_bins": 16,
    }),
]

MULTIMODAL: list[Row] = [
    ("clip", "CLIPModel", captioned_contrast, TWO_TOWERS),
    ("siglip", "SiglipModel", captioned_contrast, TWO_TOWERS),
    ("lxmert", "LxmertModel", captioned_regions, {
        **TEXT, "l_layers": 2, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16,
    }),
    ("visual_bert", "VisualBertModel", captioned_embeddings, {
        **TEXT, "visual_embedding_dim": 16,
    }),
    ("blip", "BlipModel", captioned_contrast, TWO_TOWERS),
    ("llava", "LlavaForConditionalGeneration", image_tokens, {
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "text_config": {"model_type": "llama", **TEXT},
        "image_token_index": 4, "image_token_id": 4, "image_seq_length": 16,
        "vision_feature_select_strategy": "default", "vision_feature_layer": -1,
    }),
]
# fmt: on


def cases() -> list[Case]:
    return [
        *rows_to_cases("vision", VISION_MODELS),
        *rows_to_cases("audio", AUDIO_MODELS),
        *rows_to_cases("multimodal", MULTIMODAL),
    ]
