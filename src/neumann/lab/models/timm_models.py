"""Any image model of timm, as `timm:NAME`; never with pretrained weights.

Inception-V3 gets its auxiliary head, which it returns in training only. A model is tried on one
image, so that a size it cannot take is a UsageError here and not a traceback in the first step.
timm comes with the extra `timm`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from neumann.lab.errors import UsageError, missing_package, shorten, unknown

PREFIX = "timm:"


class WithAuxiliary(nn.Module):
    """A model that returns logits and auxiliary logits, of which evaluation gets the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits, auxiliary = self.model(images)
        return (logits, auxiliary) if self.training else logits


def timm_model(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The model `name`, without the prefix, for images of `shape` (channels, height, width)."""
    try:
        import timm
    except ImportError as error:
        raise missing_package("timm", "timm", f"model {PREFIX}{name}") from error
    if not timm.is_model(name):
        raise unknown("timm model", name, timm.list_models())
    options: dict[str, Any] = {"num_classes": classes}
    if shape[0] != 3:
        options["in_chans"] = shape[0]
    expected = timm.models.get_pretrained_cfg(name)
    if expected is not None and expected.fixed_input_size:
        options["img_size"] = shape[1:]  # transformers are made for one size
    auxiliary = name.partition(".")[0] == "inception_v3"
    if auxiliary:
        options["aux_logits"] = True
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
        _try(model, shape)
    # Each model has its own way to say that it does not take such images.
    except (TypeError, ValueError, RuntimeError, AssertionError, IndexError) as error:
        made_for = f"; it was made for {_times(expected.input_size)}" if expected else ""
        raise UsageError(
            f"model {PREFIX}{name} does not take images of {_times(shape)}{made_for} "
            f"({shorten(error)})"
        ) from error
    return WithAuxiliary(model) if auxiliary else model


def _try(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """One image through the model, without a trace: no statistics, no random numbers."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(torch.zeros(1, *shape, device=device))
    model.train()


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
