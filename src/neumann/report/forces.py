"""What moves Neumann besides the gradient: r = ‖w − v‖, and the two forces at that distance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from neumann.report.curves import AXES, Curve, arm_curves
from neumann.report.phases import phases_of
from neumann.report.plots import Plot, dressed
from neumann.report.runs import Run, Track, number, step_of
from neumann.report.studies import Study


def force_plots(study: Study) -> list[Plot]:
    """r = ‖w − v‖ and the two forces of the Neumann arms."""
    arms = [arm for arm in study.arms if any(phases_of(run) for run in arm.runs)]
    distance = [c for arm in arms for c in arm_curves(arm, "epochs", _diagnostic("distance"))]
    forces = [
        curve
        for arm in arms
        for part, name in (
            ("repulsive force", "repulsive_force"),
            ("attractive force", "cubic_force"),
        )
        for curve in arm_curves(arm, "epochs", _diagnostic(name), part)
        if curve.part == part
    ]
    made = [
        Plot(
            "distance",
            "Distance from the average, r = ‖w − v‖",
            AXES["epochs"],
            "r",
            tuple(distance),
            "In the warm-up the average waits at the initial weights.",
            log_y=True,
        ),
        Plot(
            "forces",
            "Repulsion and attraction",
            AXES["epochs"],
            "force",
            tuple(forces),
            "Solid: repulsion β·r/R³. Dashed: attraction α·r². As large as they would be at the "
            "distance of the moment; they act between resets, not in the warm-up.",
            log_y=True,
        ),
    ]
    # On a log axis there is no zero: what is nothing but zeros has no curve.
    shown = [replace(plot, curves=_positive(plot.curves)) for plot in made]
    return [dressed(plot, study.arms, "epochs") for plot in shown if plot.curves]


def _diagnostic(name: str) -> Callable[[Run], Track]:
    def of(run: Run) -> Track:
        found = {}
        for line in run.lines:
            optimizer = line.get("optimizer")
            if isinstance(optimizer, dict):
                found[step_of(line)] = (
                    number(optimizer.get(name)) if name == "distance" else _force(optimizer, name)
                )
        return found

    return of


def _force(line: dict[str, Any], name: str) -> float:
    """One of the forces, of the first group that has one; NaN where there is none."""
    groups = line.get("groups")
    if not isinstance(groups, list):
        return number(None)
    return next((number(group[name]) for group in groups if name in group), number(None))


def _positive(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    def cut(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value if value > 0 else math.nan for value in values)

    made = [Curve(c.label, c.place, c.part, c.x, cut(c.y), cut(c.low), cut(c.high)) for c in curves]
    return tuple(curve for curve in made if curve.finite)
