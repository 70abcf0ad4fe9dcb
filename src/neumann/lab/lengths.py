"""Parts of a run: `2.2%` of its steps, `5ep` (epochs), or `100` (steps).

A share means the same in runs of every length and batch size. It becomes a number of steps where
the length of the run is known. Any other text, and a part longer than the run, raise a UsageError.

Arms of Neumann take them as `neumann:warmup=2.2%,reset=4.4%`, for the SGD warm-up and for K, the
first interval between resets.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neumann.lab.errors import UsageError, require

FORM = "a share of the run such as 2.2%, epochs such as 5ep, or a number of steps"
_TEXT = re.compile(r"(\d+(?:\.\d+)?)(%|ep|)")
_ROUNDING = 1e-6  # of sums in floats
_OPTIONS = ("warmup", "reset")  # of Neumann; its constructor has them in steps and in epochs


@dataclass(frozen=True)
class Length:
    """A part of a run."""

    name: str  # of the setting, for messages
    text: str  # as the user wrote it
    number: float
    unit: str  # "%", "ep", or "" for steps

    @staticmethod
    def parse(name: str, value: Any) -> "Length":
        text = str(value)
        found = _TEXT.fullmatch(text)
        if found is None or (found[2] == "" and "." in text):
            raise UsageError(f"{name} must be {FORM}; got {text!r}")
        length = Length(name, text, float(found[1]), found[2])
        share = length.unit == "%"
        require(not share or length.number <= 100, f"{name} must be at most 100%, got {text}")
        return length

    def measure(self, total_steps: int, steps_per_epoch: int) -> float:
        """Return the length in steps, not rounded."""
        if self.unit == "%":
            return self.number * total_steps / 100
        return self.number * (steps_per_epoch if self.unit == "ep" else 1)

    def count_steps(self, total_steps: int, steps_per_epoch: int) -> int:
        """Return the nearest number of steps, at least 1 unless the length is 0."""
        exact = self.measure(total_steps, steps_per_epoch)
        steps = max(math.floor(exact + 0.5), 1) if exact > 0 else 0
        long = f"{self.name} is {self.text}, which is {steps} steps; the run has {total_steps}"
        require(steps <= total_steps, long)
        return steps


def list_length_options(constructor_options: Collection[str]) -> list[str]:
    """Name the options that an arm may give as a length, by those of its constructor."""
    return [name for name in _OPTIONS if f"{name}_steps" in constructor_options]


def parse_length_options(arm: object, options: Iterable[tuple[str, Any]]) -> dict[str, Length]:
    """Find the options that are lengths, and refuse those that cannot be meant."""
    given = dict(options)
    found = {
        name: Length.parse(f"{arm}: {name}", given[name]) for name in _OPTIONS if name in given
    }
    for name in found:
        other = next(
            (f"{name}_{unit}" for unit in ("steps", "epochs") if f"{name}_{unit}" in given), None
        )
        require(other is None, f"{arm}: {name} and {other} cannot be combined")
    together = sum(length.number for length in found.values() if length.unit == "%")
    require(
        together <= 100 + _ROUNDING,
        f"{arm}: {' and '.join(found)} add up to {together:g}% of the run",
    )
    return found


def resolve_length_options(
    arm: object, options: Mapping[str, Any], total_steps: int | None, steps_per_epoch: int
) -> dict[str, Any]:
    """Replace `warmup` and `reset` by numbers of steps, under the constructor's names."""
    lengths = parse_length_options(arm, options.items())
    if not lengths:
        return dict(options)
    if total_steps is None:
        raise ValueError(f"steps must be the length of the run, since {arm} names parts of it")
    steps = {name: each.count_steps(total_steps, steps_per_epoch) for name, each in lengths.items()}
    # Not rounded: 2.2% and 97.8% fit, also where both are rounded up.
    together = sum(each.measure(total_steps, steps_per_epoch) for each in lengths.values())
    long = f"{arm}: {' and '.join(steps)} add up to {together:g} steps"
    require(together <= total_steps + _ROUNDING, f"{long}; the run has {total_steps}")
    rest = {name: value for name, value in options.items() if name not in steps}
    return rest | {f"{name}_steps": count for name, count in steps.items()}
