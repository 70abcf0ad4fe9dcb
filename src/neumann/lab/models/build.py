"""Models by name, made to fit a data set.

A model returns logits, or in training (logits, auxiliary logits) where it has an auxiliary head;
`classification_loss` takes either. Weights are drawn from torch's global generator.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from neumann.lab.data.source import Dataset
from neumann.lab.errors import UsageError, unknown
from neumann.lab.models.resnet18 import resnet18
from neumann.lab.models.sequence import GPT, GRU
from neumann.lab.models.small import cnn, mlp, resnet9
from neumann.lab.models.timm_models import PREFIX, timm_model


@dataclass(frozen=True)
class Entry:
    """How a model is made, and of what data."""

    make: Callable[[tuple[int, ...], int], nn.Module]  # from the shape of an input and the classes
    kinds: tuple[str, ...]  # of data sets
    least: int = 1  # pixels of the shorter side of an image


MODELS = {
    "mlp": Entry(mlp, ("vector", "image")),
    "cnn": Entry(lambda shape, classes: cnn(shape[0], classes), ("image",), 4),
    "resnet9": Entry(lambda shape, classes: resnet9(shape[0], classes), ("image",), 8),
    "resnet18": Entry(lambda shape, classes: resnet18(shape[0], classes), ("image",)),
    "gru": Entry(lambda shape, alphabet: GRU(alphabet), ("text",)),
    "gpt": Entry(lambda shape, alphabet: GPT(alphabet, shape[0]), ("text",)),
}
NAMES = tuple(MODELS)
FORMS = ("timm:NAME",)


def build(name: str, dataset: Dataset) -> nn.Module:
    """The model of this name for inputs and classes of the data set, on the default device.

    Raises UsageError for a name that is not known and for a model that does not fit.
    """
    if name.startswith(PREFIX):
        if dataset.kind != "image":
            raise _misfit(name, "images", dataset)
        channels, height, width = dataset.shape
        return timm_model(name.removeprefix(PREFIX), (channels, height, width), dataset.classes)
    if name not in MODELS:
        raise unknown("model", name, NAMES, FORMS)
    entry = MODELS[name]
    if dataset.kind not in entry.kinds:
        raise _misfit(name, " or ".join(_plural(kind) for kind in entry.kinds), dataset)
    if dataset.kind == "image" and min(dataset.shape[1:]) < entry.least:
        raise _misfit(name, f"images of at least {entry.least}x{entry.least}", dataset)
    return entry.make(dataset.shape, dataset.classes)


def fitting(dataset: Dataset) -> list[str]:
    """The names of the models that the data set can train."""
    image = dataset.kind == "image"
    names = [
        name
        for name, entry in MODELS.items()
        if dataset.kind in entry.kinds and not (image and min(dataset.shape[1:]) < entry.least)
    ]
    return [*names, *FORMS] if image else names


def _misfit(name: str, reads: str, dataset: Dataset) -> UsageError:
    shape = "x".join(map(str, dataset.shape))
    return UsageError(
        f"model {name} reads {reads}, but {dataset.name} holds {_plural(dataset.kind)} of {shape}; "
        f"models that fit: {', '.join(fitting(dataset))}"
    )


def _plural(kind: str) -> str:
    return kind if kind == "text" else f"{kind}s"
