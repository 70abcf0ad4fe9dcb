"""Any image model of timm, as `timm:NAME`, without pretrained weights. Needs the extra `timm`.

Options of the model follow its name, as in `timm:vit_tiny_patch16_224,patch_size=4,depth=6` or
`timm:resnet50,drop_rate=0.2,drop_path_rate=0.1` (dropout and stochastic depth).
Inception-V3 gets its auxiliary head. Every model is tried on one image, so that an unsupported size
is a UsageError here instead of a traceback in the first step.
"""

import re
from collections import Counter
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from neumann.lab.errors import UsageError, missing_package, require, shorten, unknown

PREFIX = "timm:"
OWN = ("num_classes", "in_chans", "img_size", "pretrained")  # follow from the data, or are ours


class WithAuxiliary(nn.Module):
    """Drops the auxiliary logits of a model in evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits, auxiliary = self.model(images)
        return (logits, auxiliary) if self.training else logits


def build_timm_model(text: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a timm model for images of `shape` (channels, height, width).

    `text` is its name without the prefix, with options if there are any.
    """
    name, *pieces = text.split(",")
    parsed = [_parse_option(text, piece) for piece in pieces]
    for key, count in Counter(key for key, _ in parsed).items():
        require(count == 1, f"model {PREFIX}{text} names {key} twice")
    given_options = dict(parsed)
    try:
        import timm
    except ImportError as error:
        raise missing_package("timm", "timm", f"model {PREFIX}{text}", error) from error
    # Forms with a colon or slash, such as hf-hub:NAME, would load files from elsewhere.
    if not timm.is_model(name) or set(name) & set(":/\\"):
        raise unknown("timm model", name, timm.list_models())
    options: dict[str, Any] = {} if shape[0] == 3 else {"in_chans": shape[0]}
    expected = timm.models.get_pretrained_cfg(name)
    if expected is not None and expected.fixed_input_size:
        options["img_size"] = shape[1:]  # transformers are built for one size
    auxiliary = name.partition(".")[0] == "inception_v3"
    if auxiliary:
        options["aux_logits"] = True
    try:
        options |= given_options
        model: nn.Module = timm.create_model(name, num_classes=classes, **options)
        device = next(model.parameters()).device
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(torch.zeros(1, *shape, device=device))
        model.train()
    # Each model has its own way to reject images of the wrong size, and unusual options.
    except (
        TypeError,
        ValueError,
        RuntimeError,
        LookupError,
        AttributeError,
        AssertionError,
    ) as error:
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused and refused[1] in given_options:
            raise UsageError(f"model {PREFIX}{text}: {name} has no option {refused[1]}") from error
        given = "x".join(map(str, shape))
        usual = f"; it was made for {'x'.join(map(str, expected.input_size))}" if expected else ""
        message = f"model {PREFIX}{text} does not take images of {given}{usual} ({shorten(error)})"
        raise UsageError(message) from error
    return WithAuxiliary(model) if auxiliary else model


def _parse_option(text: str, piece: str) -> tuple[str, int | float]:
    key, equals, value = piece.partition("=")
    words = {"true": True, "false": False}
    try:
        number = words[value.lower()] if value.lower() in words else float(value)
    except ValueError:
        number = nan
    if not (key.isidentifier() and equals and isfinite(number)) or key in OWN:
        raise UsageError(
            f"model {PREFIX}{text}: {piece!r} should be an option of the model with a number, true "
            f"or false, and not one of {', '.join(OWN)}"
        )
    rate = not key.endswith("_rate") or 0 <= number < 1
    require(rate, f"model {PREFIX}{text}: {key} must be in [0, 1), got {value}")
    return key, int(value) if value.lstrip("-").isdigit() else number
