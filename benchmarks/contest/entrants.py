"""Who takes part in the contest, and what identifies a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.common.ledger import Ledger, Run

RESULTS = Path("results/large-batch.jsonl")
GRID_POINTS_PER_OCTAVE = 2  # learning rates lie on a grid of ratio √2


@dataclass(frozen=True)
class Setting:
    """The tuned hyperparameters."""

    lr: float
    decay: float
    momentum: float


@dataclass(frozen=True)
class RunKey:
    """What identifies a run."""

    stage: str  # search: scored on held-out images; final: on the test set; time: alone on the GPU
    model: str
    batch: int
    epochs: int
    entrant: str
    setting: Setting
    seed: int = 0


class ContestLedger(Ledger[RunKey]):
    """All runs of the contest."""

    def __init__(self, path: Path, origin: Run | None = None) -> None:
        super().__init__(path, RunKey, origin)

    def score(self, key: RunKey) -> float:
        """The accuracy of a run in %; raises MissingRunError if there is none."""
        return read_accuracy(self.find(key))


def read_accuracy(run: Run) -> float:
    """In %, with the BatchNorm statistics of the final weights where there is BatchNorm."""
    return float(run["accuracy"] if run["recalibrated"] is None else run["recalibrated"])


@dataclass(frozen=True)
class Entrant:
    """An optimizer in the contest. Its search starts at lr/2, lr and 2·lr."""

    opt: str  # an arm of the lab, with a placeholder for the momentum
    lr: float
    decays: tuple[float, ...]
    sched: Literal["linear", "constant"] = "linear"
    ours: bool = False

    def lr_at(self, index: int) -> float:
        """The learning rate at a grid point; 0 is the middle of the first three."""
        return float(self.lr * 2.0 ** (index / GRID_POINTS_PER_OCTAVE))


# The decays of Muon and of the spectral form are decoupled and act once per step, whatever the
# momentum. A step of ours has the length lr/(1 − μ), one of Muon the length lr. Hence our decays
# are Muon's divided by 1 − 0.6.
ENTRANTS = {
    "SGD-Nesterov": Entrant("sgd:momentum={momentum}", 0.2, (5e-4, 5e-3)),
    "LARS": Entrant("lars:momentum={momentum}", 16.0, (5e-4, 5e-3)),
    "LAMB": Entrant("lamb:betas=({momentum},0.999)", 0.04, (0.01, 0.1)),
    "AdamW": Entrant("adamw:betas=({momentum},0.999)", 0.002, (0.05, 0.5)),
    "NAdamW": Entrant("nadamw:betas=({momentum},0.999)", 0.001, (0.05, 0.5)),
    "schedule-free AdamW": Entrant(
        "schedulefree:betas=({momentum},0.999)", 0.002, (0.05, 0.5), "constant"
    ),
    "Muon": Entrant("muon:momentum={momentum}", 0.04, (0.5, 2.0)),
    "Neumann (paper)": Entrant("neumann:momentum={momentum}", 0.2, (5e-4, 5e-3), ours=True),
    "Neumann diagonal": Entrant(
        "neumann:precondition=diagonal,momentum={momentum}", 0.00125, (0.1, 1.0), ours=True
    ),
    "Neumann spectral": Entrant(
        "neumann:precondition=spectral,momentum={momentum}", 0.03, (1.25, 5.0), ours=True
    ),
}
