"""Whole networks for step times by role: their parameters with random values, no forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Network:
    """A network and how to build it, on the meta device."""

    title: str
    build: Callable[[], nn.Module]


def build_gpt2(width: int, depth: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=depth, n_head=heads))


def build_llama() -> nn.Module:
    """The sizes of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        )
    )


def build_resnet50() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50(num_classes=1000)
    return model


def build_tiny() -> nn.Module:
    """For quick checks: an embedding, a transformer layer, a convolution and an output layer."""
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    return nn.Sequential(nn.Embedding(50, 32), layer, nn.Conv1d(32, 8, 3), nn.Linear(32, 50))


NETWORKS = {
    "resnet50": Network("ResNet-50", build_resnet50),
    "gpt2-124m": Network("GPT-2 124M", lambda: build_gpt2(768, 12, 12)),
    "llama-1b": Network("Llama 1B", build_llama),
    "gpt2-1.5b": Network("GPT-2 1.5B", lambda: build_gpt2(1600, 48, 25)),
    "tiny": Network("a tiny network", build_tiny),
}
PUBLISHED = ["resnet50", "gpt2-124m", "llama-1b", "gpt2-1.5b"]  # from small to large


def build_network(name: str, device: torch.device) -> nn.Module:
    """The network with random weights and no gradients."""
    with torch.device("meta"):
        model = NETWORKS[name].build()
    model.to_empty(device=device)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:  # `to_empty` has made two tensors of one
        tie()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.02)
    return model
