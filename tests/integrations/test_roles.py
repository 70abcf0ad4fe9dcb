"""The roles of real models from torchvision, timm and HF equal the committed tables.

The models are as small as their classes allow; nothing is downloaded.
"""

import pytest
import torch

from neumann.optim.roles import find_roles
from tests.support.role_tables import check_table

TORCHVISION = {
    "torchvision_resnet50": ("resnet50", {"num_classes": 7}),
    "torchvision_vit": (
        "VisionTransformer",
        {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 16}
        | {"mlp_dim": 24, "num_classes": 7},
    ),
}

TIMM = {
    "timm_resnet": ("resnet18", {}),
    "timm_convnext": ("ConvNeXt", {"depths": (1, 2, 1, 1), "dims": (8, 16, 24, 32)}),
    "timm_vit": (
        "VisionTransformer",
        {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4, "reg_tokens": 4}
        | {"init_values": 1e-5},
    ),
    "timm_swin": (
        "SwinTransformer",
        {"img_size": 32, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 4), "window_size": 4},
    ),
    "timm_mixer": ("MlpMixer", {"img_size": 32, "embed_dim": 24, "num_blocks": 2}),
}

# Sizes that differ, so that the tables show what is what.
SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
HUGGING_FACE = {
    "hf_gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 31, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 4}
        | {"add_cross_attention": True, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "hf_llama": (
        "LlamaForCausalLM",
        SMALL | {"intermediate_size": 24, "num_key_value_heads": 2},
    ),
    "hf_bert": (
        "BertForSequenceClassification",
        SMALL | {"intermediate_size": 24, "max_position_embeddings": 12, "num_labels": 3},
    ),
    "hf_t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    ),
    "hf_vit": (
        "ViTForImageClassification",
        SMALL | {"intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
    "hf_whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 31, "num_mel_bins": 5, "d_model": 16, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        | {"max_source_positions": 10, "max_target_positions": 12}
        | {f"{side}_layers": 2 for side in ("encoder", "decoder")}
        | {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        | {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
    ),
    "hf_mixtral": (
        "MixtralForCausalLM",
        SMALL | {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 3},
    ),
    # Others that store their matrices in ways of their own.
    "hf_gpt_oss": (
        "GptOssForCausalLM",
        SMALL
        | {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 3}
        | {"num_experts_per_tok": 2, "head_dim": 4},
    ),
    "hf_llama4": (
        "Llama4ForCausalLM",
        SMALL
        | {"intermediate_size": 24, "intermediate_size_mlp": 40, "num_key_value_heads": 2}
        | {"num_local_experts": 3, "head_dim": 4, "interleave_moe_layer_step": 2},
    ),
    "hf_phi3": (
        "Phi3ForCausalLM",
        SMALL | {"intermediate_size": 24, "num_key_value_heads": 2, "pad_token_id": 0},
    ),
    "hf_modernbert": (
        "ModernBertForMaskedLM",
        SMALL | {"intermediate_size": 24, "pad_token_id": 0},
    ),
    "hf_mamba": (
        "MambaForCausalLM",
        {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 5}
        | {"time_step_rank": 3},
    ),
    "hf_vit_encoder": (
        "ViTModel",
        SMALL | {"intermediate_size": 24, "image_size": 8, "patch_size": 4},
    ),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name):
    models = pytest.importorskip("torchvision").models
    called, options = TORCHVISION[name]
    check_table(name, find_roles(build(models, called, options)))


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    models = pytest.importorskip("timm").models
    called, options = TIMM[name]
    check_table(name, find_roles(build(models, called, options | {"num_classes": 7})))


def build(models, called, options):
    """A model without values: filling a ResNet-50 would take longer than all the rest."""
    with torch.device("meta"):
        model = getattr(models, called)(**options)
    return model.to_empty(device="cpu")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name):
    transformers = pytest.importorskip("transformers")
    called, options = HUGGING_FACE[name]
    cls = getattr(transformers, called)
    check_table(name, find_roles(cls(cls.config_class(**options))))
