"""Architectures of transformers that see, hear, or do both: name -> (class, options)."""

from __future__ import annotations

from typing import Any

VOCABULARY = 99
_STAGES = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_SPEECH = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_TEXT_AND_VISION = {
    part: {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "projection_dim": 16,
        **more,
    }
    for part, more in {
        "text_config": {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 0,
        },
        "vision_config": {"image_size": 32, "patch_size": 8},
    }.items()
}
SIGNALS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "vision": {
        "ViT": ("ViTForImageClassification", {}),
        "DeiT": ("DeiTForImageClassification", {}),
        "BEiT": ("BeitForImageClassification", {}),
        "DINOv2": ("Dinov2ForImageClassification", {}),
        "ViT-MAE": (
            "ViTMAEForPreTraining",
            {
                "decoder_hidden_size": 16,
                "decoder_num_hidden_layers": 2,
                "decoder_intermediate_size": 32,
            },
        ),
        "Swin": (
            "SwinForImageClassification",
            {**_STAGES, "num_attention_heads": ..., "image_size": 64, "patch_size": 4},
        ),
        "Swinv2": (
            "Swinv2ForImageClassification",
            {**_STAGES, "num_attention_heads": ..., "image_size": 64, "patch_size": 4},
        ),
        "ConvNeXT": (
            "ConvNextForImageClassification",
            {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "patch_size": 4},
        ),
        "ConvNeXTv2": (
            "ConvNextV2ForImageClassification",
            {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "patch_size": 4},
        ),
        "ResNet": (
            "ResNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
        ),
        "RegNet": (
            "RegNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "groups_width": 8},
        ),
        "MobileNetV2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}),
        "MobileViT": (
            "MobileViTForImageClassification",
            {
                "hidden_sizes": [16, 20, 24],
                "neck_hidden_sizes": [8, 8, 16, 16, 20, 24, 32],
                "image_size": 64,
                "patch_size": 2,
                "num_attention_heads": 2,
            },
        ),
        "EfficientNet": (
            "EfficientNetForImageClassification",
            {
                "width_coefficient": 0.25,
                "depth_coefficient": 0.5,
                "hidden_dim": 320,
                "image_size": 64,
            },
        ),
        "Segformer": (
            "SegformerForSemanticSegmentation",
            {
                "hidden_sizes": [8, 16, 16, 32],
                "depths": [1, 1, 1, 1],
                "decoder_hidden_size": 16,
                "num_attention_heads": [1, 2, 2, 4],
            }
            | {"patch_sizes": [7, 3, 3, 3]},
        ),
        "PoolFormer": (
            "PoolFormerForImageClassification",
            {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "patch_size": 16},
        ),
        "PVT": (
            "PvtForImageClassification",
            {
                "hidden_sizes": [8, 16, 16, 32],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 2, 2, 4],
                "image_size": 32,
                "patch_size": 4,
            },
        ),
        "CvT": (
            "CvtForImageClassification",
            {
                "embed_dim": [8, 16, 32],
                "num_heads": [1, 2, 4],
                "depth": [1, 2, 3],
                "patch_sizes": [7, 3, 3],
            },
        ),
        "FocalNet": (
            "FocalNetForImageClassification",
            {
                "embed_dim": 16,
                "depths": [1, 1],
                "focal_levels": [2, 2],
                "focal_windows": [3, 3],
                "hidden_sizes": [16, 32],
                "patch_size": 4,
            },
        ),
        "LeViT": (
            "LevitForImageClassification",
            {
                "image_size": 224,
                "patch_size": 16,
                "hidden_sizes": [16, 24, 32],
                "num_attention_heads": [1, 2, 2],
                "depths": [1, 1, 1],
                "key_dim": [8, 8, 8],
            },
        ),
        "BiT": (
            "BitForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_groups": 2},
        ),
        "YOLOS": ("YolosForObjectDetection", {"image_size": [32, 32], "num_detection_tokens": 5}),
        "DPT": (
            "DPTForDepthEstimation",
            {
                "backbone_out_indices": [0, 1, 2, 3],
                "neck_hidden_sizes": [8, 8, 16, 16],
                "fusion_hidden_size": 16,
                "is_hybrid": False,
            },
        ),
    },
    "audio": {
        "Whisper": (
            "WhisperForConditionalGeneration",
            {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
        ),
        "Wav2Vec2": ("Wav2Vec2ForCTC", _SPEECH),
        "HuBERT": ("HubertForCTC", _SPEECH),
        "WavLM": ("WavLMForCTC", {**_SPEECH, "num_buckets": 16, "max_bucket_distance": 32}),
        "UniSpeech": ("UniSpeechForCTC", {**_SPEECH, "num_codevectors_per_group": 4}),
        "SEW": ("SEWForCTC", {**_SPEECH, "squeeze_factor": 2}),
        "Data2Vec audio": (
            "Data2VecAudioForCTC",
            {**_SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
        ),
        "Speech2Text": (
            "Speech2TextForConditionalGeneration",
            {
                "input_feat_per_channel": 16,
                "input_channels": 1,
                "conv_channels": 16,
                "max_source_positions": 64,
                "max_target_positions": 64,
            },
        ),
        "AST": (
            "ASTForAudioClassification",
            {
                "max_length": 40,
                "num_mel_bins": 16,
                "patch_size": 8,
                "frequency_stride": 8,
                "time_stride": 8,
            },
        ),
        "EnCodec": (
            "EncodecModel",
            {
                "num_filters": 4,
                "hidden_size": 16,
                "codebook_dim": 16,
                "codebook_size": 16,
                "num_lstm_layers": 1,
                "target_bandwidths": [3.0],
            },
        ),
    },
    "other": {
        "CLIP": ("CLIPModel", {**_TEXT_AND_VISION, "projection_dim": 16}),
        "SigLIP": ("SiglipModel", _TEXT_AND_VISION),
        "BLIP": ("BlipForConditionalGeneration", _TEXT_AND_VISION),
        "ViLT": ("ViltModel", {"max_image_length": -1}),
        "Perceiver": (
            "PerceiverForMaskedLM",
            {
                "num_latents": 8,
                "d_latents": 16,
                "d_model": 16,
                "num_self_attends_per_block": 2,
                "num_self_attention_heads": 2,
                "num_cross_attention_heads": 2,
                "qk_channels": 16,
                "v_channels": 16,
            },
        ),
        "DecisionTransformer": (
            "DecisionTransformerModel",
            {"state_dim": 6, "act_dim": 3, "max_ep_len": 20, "n_layer": 4},
        ),
        "PatchTST": (
            "PatchTSTForRegression",
            {
                "num_input_channels": 2,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "num_targets": 1,
                "num_hidden_layers": 4,
            },
        ),
    },
}
