"""ResNet-18 as it is used on small images: a 3×3 stem of stride 1 and no max pool.

He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition (2015); 11.2 million weights.
"""

from torch import Tensor, nn
from torch.nn.functional import relu

WIDTHS = (64, 128, 256, 512)  # of the four stages, two blocks each; each but the first halves


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is 1×1 where the shape changes."""

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


def resnet18(channels: int, classes: int) -> nn.Module:
    """The network for images of any size."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(WIDTHS[0]),
        nn.ReLU(),
    ]
    before = WIDTHS[0]
    for stage, width in enumerate(WIDTHS):
        layers += [Block(before, width, stride=1 if stage == 0 else 2), Block(width, width, 1)]
        before = width
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
