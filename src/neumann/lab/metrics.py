"""What a run is scored by: accuracy with top-5, or for text the loss with its other forms.

The rest of the lab asks the metric for a value's key in the records, its name, unit and digits, and
which of two values is better, and does not need to know which one it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neumann.lab.data.dataset import is_text


@dataclass(frozen=True)
class Quantity:
    """A number in the records of a run."""

    key: str  # in the summary and in the line of an epoch
    name: str
    unit: str  # empty if it has none
    digits: int  # after the point
    phrase: str  # for sentences, with {} for the number

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def format(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Metric(Quantity):
    """The quantity that decides which run is better."""

    short: str  # its name beside the training loss
    difference_unit: str
    higher_is_better: bool
    loss_unit: str  # of the training loss
    extras: tuple[Quantity, ...] = ()  # shown next to it, where the records have them
    plotted: tuple[Quantity, ...] = ()  # over the epochs, after it

    def gain(self, value: float) -> float:
        """Turn a value into one that is higher for better runs."""
        return value if self.higher_is_better else -value

    def is_reached(self, value: float, target: float) -> bool:
        return self.gain(value) >= self.gain(target)

    def format_target(self, target: float) -> str:
        return f"{target:g} {self.unit}"

    def describe(self, values: Mapping[str, Any]) -> str:
        """Name the value and the extras of one run: "accuracy 91.23 %"."""
        parts = [f"{self.name} {self.format(values[self.key])} {self.unit}"]
        return ", ".join([*parts, *self.list_extras(values)])

    def list_extras(self, values: Mapping[str, Any]) -> list[str]:
        found = [(extra, values.get(extra.key)) for extra in self.extras]
        return [e.phrase.format(e.format(v)) for e, v in found if isinstance(v, int | float)]


CROSS_ENTROPY = Quantity("loss", "loss", "nats", 4, "a loss of {} nats")
TOP5 = Quantity("top5", "top-5", "%", 2, "{} % top-5")
ACCURACY = Metric(
    "accuracy",
    "accuracy",
    "%",
    2,
    "{} % accuracy",
    short="accuracy",
    difference_unit="points",
    higher_is_better=True,
    loss_unit="nats",
    extras=(TOP5,),
    plotted=(CROSS_ENTROPY,),
)
PERPLEXITY = Quantity("perplexity", "perplexity", "", 2, "perplexity {}")
BITS_PER_BYTE = Quantity("bits_per_byte", "bits per byte", "", 4, "{} bits per byte")
LOSS = Metric(
    "loss",
    "loss",
    "nats per token",
    4,
    "a loss of {} nats per token",
    short="evaluated loss",
    difference_unit="nats",
    higher_is_better=False,
    loss_unit="nats per token",
    extras=(PERPLEXITY, BITS_PER_BYTE),
    plotted=(BITS_PER_BYTE,),  # the perplexity would be the curve of the loss on another axis
)


def choose_metric(settings: Mapping[str, Any]) -> Metric:
    """Choose by the settings of a run or a study.

    Records of text from before `tokens` was a setting keep the accuracy that they were scored by.
    """
    text = is_text(str(settings.get("data", "")))
    return LOSS if text and "tokens" in settings else ACCURACY
