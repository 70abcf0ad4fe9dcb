"""The arms of a study: an optimizer with options and, if it needs them, settings of its own.

    neumann-spectral:lr=0.03                  an optimizer with options
    sgd:lr=0.1@sched=step@batch-size=512      after each @ a setting that only this arm has
    baseline=sgd:lr=0.1@sched=step            with a name, for tables and folders

A setting is any flag of `neumann train` that may differ between arms that are compared. One that is
unknown, has to be the same for all arms, or has the wrong type is a UsageError.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neumann.lab.config import TrainConfig, flag_name
from neumann.lab.errors import UsageError, require, unknown
from neumann.lab.optimizers.arms import WORDS, Arm, format_value
from neumann.lab.storage.field_types import find_wrong_field

# What arms are compared on, and where the records go. lr is an option of the optimizer.
SHARED = ["data", "data_dir", "download", "tokens", "held_out", "target", "seed", "opt", "lr"]
SHARED += ["output", "resume"]
OWN = tuple(f.name for f in dataclasses.fields(TrainConfig) if f.name not in SHARED)


@dataclass(frozen=True)
class Contender:
    """An arm as a comparison names it."""

    label: str  # empty: it has none
    opt: str  # the optimizer with its options
    settings: tuple[tuple[str, str], ...] = ()  # its own, with their values as text

    @staticmethod
    def parse(text: str) -> "Contender":
        """Read an arm, and check all but the options of its optimizer."""
        head, *pieces = text.split("@")
        label, opt = _split_label(head)
        settings = tuple(_split_setting(text, piece) for piece in pieces)
        names = [name for name, _ in settings]
        for name in names:
            require(names.count(name) == 1, f"{text!r} names {flag_name(name)} twice")
        Arm.parse(opt)
        contender = Contender(label, opt, settings)
        contender.get_own_settings()
        return contender

    @property
    def arm(self) -> Arm:
        return Arm.parse(self.opt)

    def get_own_settings(self) -> dict[str, Any]:
        """Return the settings that only this arm has."""
        return {name: parse_setting(name, value) for name, value in self.settings}

    def with_lr(self, lr: float) -> "Contender":
        return Contender(self.label, str(self.arm.with_options(lr=lr)), self.settings)

    def at_lr(self, lr: float) -> "Contender":
        """Return the arm at one of several learning rates, with a name that says which."""
        return replace(self.with_lr(lr), label=f"{self.label} at {lr:g}" if self.label else "")

    @property
    def name_without_lr(self) -> str:
        """What all learning rates of the arm have in common: its label, or its other text."""
        lr = dict(self.arm.options).get("lr")
        label = self.label.removesuffix(f" at {lr:g}" if isinstance(lr, int | float) else "")
        return label or str(Contender("", str(self.arm.without_lr()), self.settings))

    def __str__(self) -> str:
        own = "".join(f"@{name}={value}" for name, value in self.settings)
        return f"{self.label}={self.opt}{own}" if self.label else f"{self.opt}{own}"


def get_name(text: str) -> str:
    """Return an arm's label, or all of its text. It may be an arm that this version cannot run."""
    return _split_label(text.partition("@")[0])[0] or text


def get_optimizer_name(text: str) -> str:
    """Return the name of an arm's optimizer, which may be unknown."""
    return _split_label(text.partition("@")[0])[1].partition(":")[0]


def compose(label: str, opt: str, settings: Mapping[str, Any]) -> str:
    """Write an arm with settings of its own as text."""
    illegal = re.search("[:@=]", label)
    require(not illegal, f"arm {label!r}: a name cannot have : or @ or =")
    require("@" not in opt, f"arm {label}: opt cannot have @, got {opt!r}")
    values = {name: format_value(value) for name, value in settings.items()}
    for name, value in values.items():
        require("@" not in value, f"arm {label}: {name} cannot have @, got {value!r}")
    return str(Contender(label, opt, tuple(values.items())))


def parse_setting(name: str, text: str) -> Any:
    """Turn text into the type that the setting has."""
    candidates: list[Any] = [WORDS[text.lower()]] if text.lower() in WORDS else []
    for kind in (int, float, str):
        with contextlib.suppress(ValueError):
            candidates.append(kind(text))
    for value in candidates:
        if find_wrong_field({name: value}, TrainConfig) is None:
            return value
    raise UsageError(str(find_wrong_field({name: text}, TrainConfig)))


def _split_label(head: str) -> tuple[str, str]:
    """Split NAME=OPTIMIZER:OPTIONS. Options have an = too, but only after the colon."""
    found = re.fullmatch(r"([^:=]+)=([a-z][\w-]*(?::.*)?)", head, re.DOTALL)
    return (found[1], found[2]) if found else ("", head)


def _split_setting(text: str, piece: str) -> tuple[str, str]:
    flag, equals, value = (part.strip() for part in piece.partition("="))
    name = flag.replace("-", "_")
    if name in SHARED:
        where = "is an option of the optimizer, as in sgd:lr=0.1"
        where = where if name == "lr" else "has to be the same for all arms"
        raise UsageError(f"{text!r}: {flag} {where}")
    if name not in OWN:
        raise unknown("setting", flag, [each.replace("_", "-") for each in OWN])
    require(bool(equals and value), f"{text!r}: after @ comes SETTING=VALUE, got {piece!r}")
    return name, value
