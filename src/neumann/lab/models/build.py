"""The table of models, `build`, which looks a name up in it, and the loss that trains them.

To add a model, add a line to MODELS. A model returns logits, or (logits, auxiliary logits) if it is
in training and has an auxiliary head. Weights are drawn from torch's global generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann.lab.data.dataset import Dataset, Kind, is_text
from neumann.lab.errors import UsageError, unknown
from neumann.lab.models import gpt
from neumann.lab.models.image_models import cnn, mlp, resnet9, resnet18, resnet50
from neumann.lab.models.text_models import GPT, GRU
from neumann.lab.models.timm_models import PREFIX, build_timm_model

AUXILIARY = 0.4  # weight of the auxiliary head's loss, as in the training of Inception-V3


@dataclass(frozen=True)
class Entry:
    """How to build a model, and which data sets it can read."""

    build: Callable[[tuple[int, ...], int], nn.Module]  # from the input's shape and the classes
    kinds: tuple[Kind, ...]
    smallest: int = 1  # pixels that the shorter side of an image must have


MODELS = {
    "mlp": Entry(mlp, ("vector", "image")),
    "cnn": Entry(lambda shape, classes: cnn(shape[0], classes), ("image",), smallest=4),
    "resnet9": Entry(lambda shape, classes: resnet9(shape[0], classes), ("image",), smallest=8),
    "resnet18": Entry(lambda shape, classes: resnet18(shape[0], classes), ("image",)),
    "resnet50": Entry(lambda shape, classes: resnet50(shape[0], classes), ("image",)),
    "gru": Entry(lambda shape, alphabet: GRU(alphabet), ("text",)),
    "gpt": Entry(lambda shape, alphabet: GPT(alphabet, shape[0]), ("text",)),
}
RESNET9_PREFIX = "resnet9:width="
FORMS = (f"{RESNET9_PREFIX}W", *gpt.FORMS, f"{PREFIX}NAME")
PLURALS = {"vector": "vectors", "image": "images", "text": "text"}


def check_model(name: str, data: str) -> None:
    """Raise a UsageError for a wrong name, or a model that cannot read a text.

    Both are found before a text is tokenized, which can take minutes.
    """
    entry = _find_entry(name)
    if is_text(data) and "text" not in entry.kinds:
        fitting = [*(known for known, e in MODELS.items() if "text" in e.kinds), *gpt.FORMS]
        raise UsageError(
            f"model {name} reads {_describe_kinds(entry)}, but {data} is a text; models that fit: "
            f"{', '.join(fitting)}"
        )


def build(name: str, dataset: Dataset) -> nn.Module:
    """Build a model by name for the inputs and classes of a data set, on the default device."""
    entry = _find_entry(name)
    if not _fits(entry, dataset):
        reads = _describe_kinds(entry)
        if dataset.kind in entry.kinds:
            reads = f"images of at least {entry.smallest}x{entry.smallest}"
        shape = "x".join(map(str, dataset.shape))
        raise UsageError(
            f"model {name} reads {reads}, but {dataset.name} holds {PLURALS[dataset.kind]} of "
            f"{shape}; models that fit: {', '.join(list_fitting_models(dataset))}"
        )
    return entry.build(dataset.shape, dataset.classes)


def list_fitting_models(dataset: Dataset) -> list[str]:
    names = [name for name, entry in MODELS.items() if _fits(entry, dataset)]
    forms = {"image": (f"{PREFIX}NAME",), "text": gpt.FORMS}
    return [*names, *forms.get(dataset.kind, ())]


def classification_loss(
    output: Tensor | tuple[Tensor, Tensor], labels: Tensor, smoothing: float = 0.0
) -> Tensor:
    """The mean cross-entropy; an auxiliary head adds 0.4 times its own.

    Logits are (batch[, time], classes), labels (batch[, time]) int64. `smoothing` is the share of
    each label that is spread over all classes.
    """
    if isinstance(output, tuple):
        main, auxiliary = (classification_loss(logits, labels, smoothing) for logits in output)
        return main + AUXILIARY * auxiliary
    return cross_entropy(output.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)


def _find_entry(name: str) -> Entry:
    if name.startswith(PREFIX):
        return Entry(partial(build_timm_model, name.removeprefix(PREFIX)), ("image",))
    if name.startswith(RESNET9_PREFIX):
        width = _parse_width(name)
        return Entry(lambda shape, classes: resnet9(shape[0], classes, width), ("image",), 8)
    if name.startswith(gpt.PREFIX):
        gpt.parse_size(name)  # raises for a wrong one
        return Entry(partial(gpt.build_gpt, name), ("text",))
    if name not in MODELS:
        raise unknown("model", name, MODELS, FORMS)
    return MODELS[name]


def _describe_kinds(entry: Entry) -> str:
    return " or ".join(PLURALS[kind] for kind in entry.kinds)


def _parse_width(name: str) -> int:
    text = name.removeprefix(RESNET9_PREFIX)
    if not (text.isascii() and text.isdigit() and int(text[:6]) >= 1 and len(text) <= 6):
        raise UsageError(f"model {name}: width must be a whole number above 0, got {text!r}")
    return int(text)


def _fits(entry: Entry, dataset: Dataset) -> bool:
    large_enough = dataset.kind != "image" or min(dataset.shape[1:]) >= entry.smallest
    return dataset.kind in entry.kinds and large_enough
