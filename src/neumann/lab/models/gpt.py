"""A modern GPT, as `gpt:small`, `gpt:124m` or `gpt:width=512,depth=8`.

Each layer adds causal attention and a feed-forward branch to the residual stream x (batch, time,
width), where N divides each vector by its root mean square:

    x ← x + O softmax(N(R q) N(R k)ᵀ / √d) v      q, k, v = Q N(x), K N(x), V N(x)
    x ← x + D relu(U N(x))²

R turns pairs of features by angles that grow with the position (rotary positions), d is the number
of features of a head. Embedding and output layer share their weights with `tied=1` alone. There are
no biases and no weights in N, so every weight is part of a matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, rms_norm, scaled_dot_product_attention

from neumann.lab.errors import UsageError, unknown

PREFIX = "gpt:"
HEAD_WIDTH = 64  # features of a head, unless the number of heads is given
EMBEDDING_STD = 0.02
ROTARY_BASE = 10_000.0
EPS = 1e-7  # added to the mean square
OPTIONS = ("width", "depth", "heads", "tied")


@dataclass(frozen=True)
class Size:
    width: int
    depth: int  # layers
    heads: int | None = None  # None: as many as have HEAD_WIDTH features
    tied: int = 0  # 1: embedding and output layer are one matrix

    @property
    def head_count(self) -> int:
        return self.heads or max(1, self.width // HEAD_WIDTH)


# 124m: width, depth and heads of GPT-2. It has as many weights with its vocabulary and `tied=1`.
SIZES = {"small": Size(384, 6), "124m": Size(768, 12)}
FORMS = (*(f"{PREFIX}{name}" for name in SIZES), f"{PREFIX}width=W,depth=D,heads=H")


def parse_size(name: str) -> Size:
    """Read a name such as gpt:small, gpt:width=512 or gpt:124m,depth=6; UsageError if it is wrong.

    Options that are not given are those of gpt:small.
    """
    pieces = name.removeprefix(PREFIX).split(",")
    size = SIZES["small"]
    if "=" not in pieces[0]:
        chosen = pieces.pop(0)
        if chosen not in SIZES:
            raise unknown("model", name, FORMS)
        size = SIZES[chosen]
    given: dict[str, int] = {}
    for piece in pieces:
        key, _, text = piece.partition("=")
        if key == "context":
            raise UsageError(f"model {name}: set the context with --context")
        if key not in OPTIONS:
            raise unknown(f"{PREFIX.rstrip(':')} option", key, OPTIONS)
        if key in given:
            raise UsageError(f"model {name} names {key} twice")
        least = 0 if key == "tied" else 1
        if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= least):
            raise UsageError(
                f"model {name}: {key} must be a whole number of at least {least}, got {text!r}"
            )
        given[key] = int(text)
    size = replace(size, **given)
    if size.tied > 1:
        raise UsageError(f"model {name}: tied must be 0 or 1, got {size.tied}")
    if size.width % (2 * size.head_count):
        raise UsageError(
            f"model {name}: the width must be a multiple of {2 * size.head_count}, twice the "
            f"number of heads, so that each has an even number of features; got {size.width}"
        )
    return size


def build_gpt(name: str, shape: Sequence[int], vocabulary: int) -> nn.Module:
    return ModernGPT(vocabulary, shape[0], parse_size(name))


class ModernGPT(nn.Module):
    """Logits (batch, time, vocabulary) of the token after each of (batch, time) tokens."""

    def __init__(self, vocabulary: int, context: int, size: Size) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.depth))
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        angles = _make_angles(context, size.width // size.head_count)
        self.cosines: Tensor
        self.sines: Tensor
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        # Small, so that the first prediction is nearly uniform, but not 0: then the layers below
        # would have no gradient in the first step.
        nn.init.normal_(self.head.weight, std=1 / size.width)
        if size.tied:
            self.embedding.weight = self.head.weight
        for key, p in self.layers.named_parameters():
            # The 2·depth branches together add about as much to the stream as it holds.
            scale = sqrt(2 * size.depth) if key.endswith("out.weight") else 1
            nn.init.normal_(p, std=1 / (sqrt(p.shape[1]) * scale))

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"a window has at most {self.context} tokens, got {time}")
        positions = self.cosines[:time], self.sines[:time]
        stream = _normalize(self.embedding(tokens))
        for layer in self.layers:
            stream = layer(stream, *positions)
        logits: Tensor = self.head(_normalize(stream))
        return logits


class Layer(nn.Module):
    """One layer. Q, K and V are matrices of their own, so that an optimizer may treat them so."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.head_count
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.forward_in = nn.Linear(width, 4 * width, bias=False)
        self.forward_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        stream = stream + self._attend(_normalize(stream), cosines, sines)
        branch: Tensor = self.forward_out(relu(self.forward_in(_normalize(stream))).square())
        return stream + branch

    def _attend(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        # Attention runs in the precision of the values: bfloat16 under autocast.
        query, key = (
            _normalize(_rotate(part, cosines, sines)).to(value.dtype) for part in (query, key)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.attention_out(attended.transpose(1, 2).flatten(2))
        return merged


def _normalize(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], eps=EPS)


def _make_angles(context: int, features: int) -> Tensor:
    """The angle of each position for each pair of features: (context, features / 2)."""
    exponents = torch.arange(0, features, 2, dtype=torch.float32) / features
    frequencies = ROTARY_BASE**-exponents
    return torch.outer(torch.arange(context, dtype=torch.float32), frequencies)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn feature i and feature i + d/2 of each head by the angle of their position."""
    first, second = x.chunk(2, -1)
    turned = first * cosines - second * sines, first * sines + second * cosines
    return torch.cat(turned, -1)
