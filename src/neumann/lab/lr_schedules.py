"""The learning rate of a run, as `--sched` names it: the library's rules with their parameters.

    constant, linear, cosine
    power:EXPONENT          (1 − share of the run)^EXPONENT; power is 0.7, and 1 is linear
    step:FACTOR,LENGTH      × FACTOR every LENGTH; step is the paper's × 0.3 every 40 epochs
    inverse:LENGTH          1/(1 + t/LENGTH); inverse halves the peak after one epoch
    rescaled                × 0.3 at 2/7, 4/7 and 6/7 of the steps after the ramp

A LENGTH is part of a run, as in `step:0.3,17.7%` and `step:0.94,2ep`. All follow a ramp from zero.
Names and parameters that do not exist are a UsageError.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from neumann.lab.errors import UsageError, require, unknown
from neumann.lab.lengths import Length
from neumann.optim.lr_rules import SCHEDULE_NAMES, lr_factor

SCHED = "--sched"
_PARAMETERS = {"power": ("EXPONENT",), "step": ("FACTOR", "LENGTH"), "inverse": ("LENGTH",)}


@dataclass(frozen=True)
class Schedule:
    """A rule of `neumann.optim.schedules` by name; None is the rule's usual parameter."""

    name: str
    factor: float | None = None
    length: Length | None = None
    exponent: float | None = None

    @staticmethod
    def parse(text: str) -> "Schedule":
        name, colon, rest = text.partition(":")
        if name not in SCHEDULE_NAMES:
            raise unknown(SCHED, name, SCHEDULE_NAMES)
        words = rest.split(",") if colon else []
        known = _PARAMETERS.get(name, ())
        form = f"{name}:{','.join(known)}" if known else f"{name}, without parameters"
        require(len(words) <= len(known), f"{SCHED} {text}: it should be {form}")
        given = dict(zip(known, words, strict=False))
        factor = _parse_factor(text, given["FACTOR"]) if "FACTOR" in given else None
        length = None
        if "LENGTH" in given:
            length = Length.parse(f"{SCHED} {text}: the length", given["LENGTH"])
            require(length.number > 0, f"{SCHED} {text}: the length must be above 0")
        exponent = _parse_exponent(text, given["EXPONENT"]) if "EXPONENT" in given else None
        return Schedule(name, factor, length, exponent)

    def bind(
        self, total_steps: int, ramp_steps: int, steps_per_epoch: int
    ) -> Callable[[int], float]:
        """Return what the peak is multiplied by, as a function of the step (from 0)."""
        options: dict[str, Any] = {}
        if self.factor is not None:
            options["factor"] = self.factor
        if self.exponent is not None:
            options["power"] = self.exponent
        if self.length is not None:
            steps = self.length.measure(total_steps, steps_per_epoch)
            options["period_steps" if self.name == "step" else "decay_steps"] = steps
        return partial(
            lr_factor,
            self.name,
            total_steps=total_steps,
            ramp_steps=ramp_steps,
            steps_per_epoch=steps_per_epoch,
            **options,
        )


def _parse_exponent(text: str, word: str) -> float:
    exponent = _read_number(word)
    if not 0 < exponent < math.inf:
        raise UsageError(
            f"{SCHED} {text}: the exponent must be a finite number above 0, as in power:0.7; "
            f"got {word!r}"
        )
    return exponent


def _parse_factor(text: str, word: str) -> float:
    factor = _read_number(word)
    if not 0 < factor <= 1:
        raise UsageError(f"{SCHED} {text}: the factor must be above 0 and at most 1, got {word!r}")
    return factor


def _read_number(word: str) -> float:
    """The number, or NaN."""
    try:
        return float(word)
    except ValueError:
        return math.nan
