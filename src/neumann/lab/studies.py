"""What a comparison and a sweep are: records like that of a training, from flags or a file."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neumann.lab.config import RatedSettings, Settings, TrainConfig, flag
from neumann.lab.errors import UsageError
from neumann.lab.naming import NAME_BYTES, plain_name
from neumann.lab.optimizers import Arm


@dataclass(frozen=True)
class CompareConfig(RatedSettings):
    """Train several optimizers over the same seeds, and say how they differ."""

    arms: tuple[str, ...] = ("neumann", "sgd", "rmsprop", "adam", "adamw")
    """optimizers, each with options as in neumann:lr=0.2; the first is compared with the others"""
    seeds: int = 3
    """trainings of each arm; a seed gives all arms the same initial weights and data order"""
    jobs: int = 1
    """trainings side by side"""

    def check(self) -> None:
        """Refuse what cannot work, before anything is trained."""
        super().check()
        _check_arms(self.arms)
        _check_positive(self, "seeds", "jobs")

    @property
    def title(self) -> str:
        """What is compared, in short."""
        return f"{super().title}-compare"

    def run(self, arm: str, seed: int, output: Path) -> TrainConfig:
        """One of the trainings, which continues if it was begun."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(RatedSettings)}
        shared["output"] = output
        return TrainConfig(**shared, opt=arm, seed=seed, resume="auto").resolve()


@dataclass(frozen=True)
class SweepConfig(Settings):
    """Choose each optimizer's learning rate on held-out data, then compare them.

    Budgets are equal, and only the final comparison sees the test set.
    """

    arms: tuple[str, ...] = ("neumann", "sgd", "adamw")
    """optimizers; one may have a range of its own, as in adamw:lr=1e-4:1e-2:7"""
    lr: str | None = None
    """learning rates to try, LOW:HIGH:COUNT in equal ratios; by default 7 about the usual one"""
    search_seeds: int = 1
    """trainings of each learning rate"""
    search_epochs: int | None = None
    """epochs of those; by default --epochs"""
    seeds: int = 3
    """trainings of each optimizer in the final comparison"""
    jobs: int = 1
    """trainings side by side"""

    def check(self) -> None:
        """Refuse what cannot work, before anything is trained; the ranges are not looked at."""
        super().check()
        _check_arms(self.arms)
        _check_positive(self, "search_seeds", "search_epochs", "seeds", "jobs")
        if self.held_out:
            raise UsageError(
                "--held-out is for train and compare: a sweep always searches on a held-out part "
                "and tests on the test set"
            )

    @property
    def title(self) -> str:
        """What is swept, in short."""
        return f"{super().title}-sweep"

    def compared(self, arms: tuple[str, ...], **changes: Any) -> CompareConfig:
        """A comparison of these arms in which all else is as here, but for the changes."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)}
        return CompareConfig(**{**shared, "arms": arms, "jobs": self.jobs, **changes})


def _check_arms(arms: tuple[str, ...]) -> None:
    if not arms:
        raise UsageError("--arms must name at least one optimizer")
    twice = next((arm for arm in arms if arms.count(arm) > 1), None)
    if twice:
        raise UsageError(f"--arms names {twice} twice")
    folders: dict[str, str] = {}
    for arm in arms:
        Arm.parse(arm).check()
        folder = plain_name(arm)
        if len(os.fsencode(folder)) > NAME_BYTES:
            raise UsageError(
                f"--arms: {arm[:40]}… is too long for the name of a folder, which has at most "
                f"{NAME_BYTES} bytes"
            )
        # Some file systems take upper and lower case for the same.
        other = folders.setdefault(folder.casefold(), arm)
        if other != arm:
            raise UsageError(f"--arms: {other!r} and {arm!r} would share the folder {folder}")


def _check_positive(config: Settings, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"{flag(name)} must be at least 1, got {value}")
