"""Networks for small images: an MLP (also for vectors), a CNN, and ResNet-9, -18 and -50."""

from itertools import pairwise
from math import prod
from typing import Protocol

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
    """The ResNet-9 of the CIFAR speed records, with 6.6 million parameters; for 8×8 or larger.

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
    """ResNet-18 for small images of any size, with 11.2 million parameters.

    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition (2015), with a 3×3 stem of
    stride 1 and no max pool.
    """
    return _resnet(channels, classes, Block, (64, 128, 256, 512), (2, 2, 2, 2))


def resnet50(channels: int, classes: int) -> nn.Module:
    """ResNet-50 for small images of any size, with 23.5 M parameters and the stem of ResNet-18.

    A block of stride 2 has it in its 3×3 convolution, as torchvision's and timm's have.
    """
    return _resnet(channels, classes, Bottleneck, (256, 512, 1024, 2048), (3, 4, 6, 3))


class _BlockKind(Protocol):
    def __call__(self, before: int, after: int, stride: int) -> nn.Module: ...


def _resnet(
    channels: int, classes: int, block: _BlockKind, widths: tuple[int, ...], counts: tuple[int, ...]
) -> nn.Module:
    """A stem of 64 channels, then stages of `counts` blocks; all but the first halve the image."""
    layers = _convolution(channels, 64)
    for stage, ((before, after), count) in enumerate(
        zip(pairwise((64, *widths)), counts, strict=True)
    ):
        layers.append(block(before, after, stride=2 if stage else 1))
        layers += [block(after, after, stride=1) for _ in range(count - 1)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    model = nn.Sequential(*layers, *head)
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
        self.shortcut = _shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1×1, 3×3 and 1×1 convolutions, the first two a quarter as wide."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        width = after // 4
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)
        self.shortcut = _shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))
        return relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    """The identity, or a 1×1 convolution if the shape changes."""
    if stride == 1 and before == after:
        return nn.Identity()
    convolution = nn.Conv2d(before, after, 1, stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


def _convolution(before: int, after: int, *, pool: bool = False) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    layers = [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return [*layers, nn.MaxPool2d(2)] if pool else layers
