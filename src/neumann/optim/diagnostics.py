"""What the optimizer is doing: phase, distance, momentum and forces, for logs and plots.

A `Diagnostics` holds copies of tensors; nothing waits for the device until a property is read.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from neumann.optim.distance import repulsion
from neumann.optim.options import COMMON, OWN, StepOptions
from neumann.optim.phases import Timetable
from neumann.optim.state import CLOCK, DISTANCE, SKIPPED, StateStore


@dataclass(frozen=True)
class GroupDiagnostics:
    """One parameter group."""

    _lr: Any
    _momentum: Tensor
    _distance_squared: Tensor
    _options: StepOptions

    @property
    def lr(self) -> float:
        """η of the next step."""
        return float(self._lr)

    @property
    def momentum(self) -> float:
        """μ of the last completed step; 0 in the warm-up."""
        return float(self._momentum)

    @property
    def cubic_force(self) -> float:
        """α·r², the attraction to the average at the current distance."""
        return self._options.cubic * float(self._distance_squared)

    @property
    def repulsive_force(self) -> float:
        """β·r/R³, the repulsion from the average at the current distance."""
        if self._options.repulsive == 0:
            return 0.0
        distance = self._distance_squared.sqrt()
        return float(repulsion(distance, self.lr, self.momentum, self._options) * distance)


@dataclass(frozen=True)
class Diagnostics:
    """The state of the whole optimizer after its last completed step."""

    groups: tuple[GroupDiagnostics, ...]
    _timetable: Timetable
    _step: Tensor
    _skipped: Tensor
    _distance_squared: Tensor

    @property
    def step(self) -> int:
        """Completed steps, warm-up included, skipped steps not."""
        return int(self._step)

    @property
    def skipped(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return int(self._skipped)

    @property
    def phase(self) -> str:
        """The phase of the last completed step: "warm-up", "reset" or "iterate".

        Before the first step it is the phase of that one.
        """
        return self._timetable.place(max(self.step, 1)).phase.value

    @property
    def t(self) -> int:
        """Steps since the warm-up; 0 during it."""
        return self._timetable.place(self.step).t

    @property
    def distance(self) -> float:
        """r = ‖w − v‖ over all parameters, for the next step.

        With sharded parameters it is that of the last step, and NaN after a load, because a process
        cannot compute more from its own shards.
        """
        return float(self._distance_squared.sqrt())

    @property
    def steps_to_reset(self) -> int | None:
        """1 if the next step resets; None if there is no further reset."""
        step, warmup = self.step, self._timetable.warmup_steps
        reset = self._timetable.next_reset(step + 1 - warmup)
        return None if reset is None else reset + warmup - step

    def as_dict(self) -> dict[str, Any]:
        """All values as plain numbers and strings, ready for JSON."""
        names = ("step", "skipped", "phase", "t", "distance", "steps_to_reset")
        of_group = ("lr", "momentum", "cubic_force", "repulsive_force")
        return {
            **{name: getattr(self, name) for name in names},
            "groups": [{name: getattr(group, name) for name in of_group} for group in self.groups],
        }


def diagnose(store: StateStore, options: StepOptions) -> Diagnostics:
    """The optimizer as it is now; r² must be up to date."""
    squared = store.scalars[DISTANCE].detach().clone()
    groups = []
    for group, momentum in zip(store.groups, store.momenta, strict=True):
        lr = group["lr"]
        lr = lr.detach().clone() if isinstance(lr, Tensor) else lr
        groups.append(GroupDiagnostics(lr, momentum.clone(), squared, options))
    clock, skipped = store.scalars[CLOCK].clone(), store.scalars[SKIPPED].clone()
    return Diagnostics(tuple(groups), options.timetable, clock, skipped, squared)


def describe(store: StateStore) -> str:
    """The optimizer in words: where it is in its run, and all options."""
    first, step = store.groups[0], int(store.scalars[CLOCK])
    timetable = store.timetable()
    phase, t = timetable.place(max(step, 1)).phase, timetable.place(step).t
    common = ", ".join(f"{name}={first[name]!r}" for name in COMMON)
    lines = [f"Neumann(step={step}, phase={phase.value!r}, t={t}, {common}"]
    for index, group in enumerate(store.groups):
        tensors, weights = len(group["params"]), sum(p.numel() for p in group["params"])
        own = ", ".join(f"{name}={group[name]!r}" for name in OWN)
        lines.append(f"  group {index}: {tensors} tensors, {weights:,} weights, {own}")
    return "\n".join(lines) + "\n)"
