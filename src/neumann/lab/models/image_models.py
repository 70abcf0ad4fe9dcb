"""Networks for small images: an MLP (also for vectors), a CNN, ResNet-9 and ResNet-18."""

from itertools import pairwise
from math import prod

from torch import Tensor, nn
from torch.nn.functional import relu


def mlp(shape: tuple[int, ...], classes: int, widths: tuple[int, ...] = (128, 64)) -> nn.Module:
    """Linear layers with ReLU between them, for inputs of any shape."""
    sizes = (prod(shape), *widths)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(channels: int, classes: int) -> nn.Module:
    """Three convolutions with 32, 64 and 128 channels and two max pools; for 4×4 or larger."""
    return nn.Sequential(
        *_convolution(channels, 32, pool=True),
        *_convolution(32, 64, pool=True),
        *_convolution(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def resnet9(channels: int, classes: int, width: int = 64) -> nn.Module:
    """The ResNet-9 of the CIFAR speed records, with 6.6 million weights; for 8×8 or larger.

    `width` is the number of channels after the first layer; the last has eight times as many.
    """
    return nn.Sequential(
        *_convolution(channels, width),
        *_convolution(width, 2 * width, pool=True),
        Residual(2 * width),
        *_convolution(2 * width, 4 * width, pool=True),
        *_convolution(4 * width, 8 * width, pool=True),
        Residual(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes, bias=False),
        Scale(0.125),
    )


def resnet18(channels: int, classes: int) -> nn.Module:
    """ResNet-18 for small images of any size, with 11.2 million weights.

    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition (2015), with a 3×3 stem of
    stride 1 and no max pool.
    """
    layers = [*_convolution(channels, 64), Block(64, 64, stride=1), Block(64, 64, stride=1)]
    for before, after in pairwise((64, 128, 256, 512)):
        layers += [Block(before, after, stride=2), Block(after, after, stride=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Residual(nn.Module):
    """A block of ResNet-9: x plus two convolutions of x, each with BatchNorm and ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        twice = (*_convolution(channels, channels), *_convolution(channels, channels))
        self.branch = nn.Sequential(*twice)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.branch(x)
        return x + branch


class Block(nn.Module):
    """A block of ResNet-18: two 3×3 convolutions and a shortcut, 1×1 if the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _convolution(before: int, after: int, *, pool: bool = False) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    layers = [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return [*layers, nn.MaxPool2d(2)] if pool else layers
