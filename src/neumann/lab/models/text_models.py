"""Small models of text. For each token of a window (batch, time) they predict the next one."""

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class GRU(nn.Module):
    """Gated recurrent units between an embedding and a linear layer."""

    def __init__(self, alphabet: int, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.recurrent = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, alphabet)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits


class GPT(nn.Module):
    """A pre-norm transformer with learned positions; the head shares the embedding's weights."""

    def __init__(
        self, alphabet: int, context: int, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):  # each layer adds two branches to the residual stream
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > len(self.position):
            raise ValueError(f"a window has at most {len(self.position)} tokens, got {time}")
        stream: Tensor = self.embedding(tokens) + self.position[:time]
        for layer in self.layers:
            stream = layer(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Layer(nn.Module):
    """Causal attention, then a feed-forward branch, both added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.forward_norm = nn.LayerNorm(width)
        self.forward_in = nn.Linear(width, 4 * width)
        self.forward_out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self._attention(self.attention_norm(stream))
        branch: Tensor = self.forward_out(gelu(self.forward_in(self.forward_norm(stream))))
        return stream + branch

    def _attention(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        projected = self.attention_in(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return merged
