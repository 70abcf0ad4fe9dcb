"""Small networks: an MLP for what can be laid flat, a CNN and ResNet-9 for small images."""

from itertools import pairwise
from math import prod

from torch import Tensor, nn


def mlp(shape: tuple[int, ...], classes: int, widths: tuple[int, ...] = (128, 64)) -> nn.Module:
    """Linear layers with ReLU between them, for inputs of any shape."""
    sizes = (prod(shape), *widths)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(channels: int, classes: int) -> nn.Module:
    """Three convolutions of 32, 64 and 128 channels, two of them pooled; images from 4×4."""
    return nn.Sequential(
        *_convolution(channels, 32),
        nn.MaxPool2d(2),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def resnet9(channels: int, classes: int) -> nn.Module:
    """The ResNet-9 of the CIFAR speed records; images of 8×8 or more.

    6.6 million weights. The last convolutions are pooled to one maximum a channel, the classifier
    has no bias, and its logits are scaled by 1/8.
    """
    return nn.Sequential(
        *_convolution(channels, 64),
        *_convolution(64, 128),
        nn.MaxPool2d(2),
        Residual(128),
        *_convolution(128, 256),
        nn.MaxPool2d(2),
        *_convolution(256, 512),
        nn.MaxPool2d(2),
        Residual(512),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes, bias=False),
        Scale(0.125),
    )


class Residual(nn.Module):
    """x plus two convolutions of x, each with BatchNorm and ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(channels, channels), *_convolution(channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.branch(x)
        return x + branch


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    ]
