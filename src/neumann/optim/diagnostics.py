"""What the optimizer is doing: phase, distance, momentum and forces, for logs and plots.

A `Diagnostics` holds tensors as they were when it was made; nothing waits for the device until a
property is read.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from neumann.optim.distance import repulsion
from neumann.optim.phases import Timetable


@dataclass(frozen=True)
class GroupDiagnostics:
    """One parameter group."""

    _lr: Any
    _momentum: Tensor
    _distance_squared: Tensor
    _cubic: float  # α
    _repulsive: float  # β, times the number of variables
    _average: float
    _bounded: bool

    @property
    def lr(self) -> float:
        """η as the next step would take it."""
        return float(self._lr)

    @property
    def momentum(self) -> float:
        """μ of the last completed step; 0 in the warm-up."""
        return float(self._momentum)

    @property
    def cubic_force(self) -> float:
        """α·r², the attraction towards the average at the present distance."""
        return self._cubic * float(self._distance_squared)

    @property
    def repulsive_force(self) -> float:
        """β·r/R³, the repulsion from the average at the present distance."""
        if self._repulsive == 0:
            return 0.0
        distance = self._distance_squared.sqrt()
        strength = repulsion(
            distance, self.lr, self.momentum, self._average, self._repulsive, self._bounded
        )
        return float(strength * distance)


@dataclass(frozen=True)
class Diagnostics:
    """The whole optimizer, after its last completed step."""

    groups: tuple[GroupDiagnostics, ...]
    _timetable: Timetable
    _step: Tensor
    _skipped: Tensor
    _distance_squared: Tensor

    @property
    def step(self) -> int:
        """Completed steps, the warm-up's included and skipped ones not."""
        return int(self._step)

    @property
    def skipped(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return int(self._skipped)

    @property
    def phase(self) -> str:
        """The phase of the last completed step: "warm-up", "reset" or "iterate"."""
        return self._timetable.place(self.step).phase.value

    @property
    def t(self) -> int:
        """Steps since the warm-up; 0 in it."""
        return self._timetable.place(self.step).t

    @property
    def distance(self) -> float:
        """r = ‖w − v‖ over all parameters, as the next step will see it.

        Of sharded parameters as the last step saw it, NaN after a load: no process knows more.
        """
        return float(self._distance_squared.sqrt())

    @property
    def steps_to_reset(self) -> int | None:
        """1 if the next step resets; None if no reset will come."""
        step, warmup = self.step, self._timetable.warmup_steps
        reset = self._timetable.next_reset(step + 1 - warmup)
        return None if reset is None else reset + warmup - step

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings, ready for JSON."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "phase": self.phase,
            "t": self.t,
            "distance": self.distance,
            "steps_to_reset": self.steps_to_reset,
            "groups": [
                {
                    "lr": group.lr,
                    "momentum": group.momentum,
                    "cubic_force": group.cubic_force,
                    "repulsive_force": group.repulsive_force,
                }
                for group in self.groups
            ],
        }
