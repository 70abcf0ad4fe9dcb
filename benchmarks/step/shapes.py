"""The parameter shapes of the networks whose optimizer step is timed."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """The shapes of one network's parameters."""

    title: str
    shapes: tuple[Shape, ...]

    @property
    def weights(self) -> int:
        return sum(map(prod, self.shapes))


def resnet50_shapes() -> list[Shape]:
    """ResNet-50 for 1,000 classes: 161 tensors, 25.6 M parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, channels, 1), (width, width, 3), (4 * width, width, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1))
            for filters, inputs, kernel in convolutions:
                shapes += [(filters, inputs, kernel, kernel), (filters,), (filters,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_shapes() -> list[Shape]:
    """GPT-2 small with tied embeddings: 148 tensors, 124 M parameters."""
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feedforward: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block = [*norm, *attention, *norm, *feedforward]
    return [(50257, width), (1024, width), *block * 12, *norm]


CASES = {
    "a": Case("ResNet-50", tuple(resnet50_shapes())),
    "b": Case("GPT-2 124M", tuple(gpt2_shapes())),
    "c": Case("one tensor of 2^27", ((2**27,),)),
    "d": Case("10,000 tensors of 1,000", ((1000,),) * 10_000),
    "e": Case("a small MLP", ((256, 784), (256,), (10, 256), (10,))),
}
PUBLISHED = ["a", "b", "c", "d"]  # the others are for quick checks


def make_parameters(shapes: Sequence[Shape], device: torch.device) -> list[nn.Parameter]:
    """Random parameters with gradients."""
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    return parameters
