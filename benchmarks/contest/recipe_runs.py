"""Runs of the recipe on images, as a contest's trainer sees them: nothing in it is tuned."""

import dataclasses

from benchmarks.common.coordinates import Point
from benchmarks.contest.entrants import RunKey, Setting
from benchmarks.contest.trainer import Trainer
from neumann.lab.config import TrainConfig
from neumann.optim.recipe import LR, RAMP

OURS = "recipe"
BATCH = 8192
# Whom it is tested against, and where their searches start.
PEERS: dict[str, Point] = {
    "Muon": {"lr": 0.04, "decay": 2.0, "momentum": 0.6},
    "AdamW": {"lr": 0.002, "decay": 0.5, "momentum": 0.6},
}


def make_recipe(lr: float = LR) -> Setting:
    """The recipe's setting. It chooses decay and momentum itself, so they are 0 here."""
    return Setting(lr, decay=0.0, momentum=0.0)


class RecipeTrainer(Trainer):
    """Trains the contest's entrants, and the recipe."""

    def configure(self, key: RunKey) -> TrainConfig:
        if key.entrant != OURS:
            return super().configure(key)
        # Any entrant will do: what depends on it is replaced.
        config = super().configure(dataclasses.replace(key, entrant="Neumann spectral"))
        return dataclasses.replace(
            config,
            opt="neumann-spectral:weight_decay=auto",
            weight_decay=0.0,
            ramp_epochs=key.epochs * RAMP,
        ).resolve()
