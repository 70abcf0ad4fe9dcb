"""When a Neumann run warmed up and reset, from records that have a line only every N steps.

Each line says how many steps are left to the next reset, so the first reset after every line is
known, but not a second one before the next line. All of them follow from the arm's options, which
are trusted where they agree with every line. Where they do not (a scheduler changed them, another
version wrote the records) only what the lines themselves say is used, and `whole` is False.

The optimizer's clock leaves out skipped steps; places given here are steps of the run.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from neumann.lab.errors import UsageError
from neumann.lab.optimizers import Arm
from neumann.optim import Neumann
from neumann.optim.options import completed, in_steps
from neumann.optim.phases import Phase, Timetable
from neumann.report.runs import Run, step_of


@dataclass(frozen=True)
class Phases:
    """Steps of a run, counted from 1."""

    warmup: int  # the last step of the warm-up; 0: there was none
    resets: tuple[int, ...]  # those up to the last line
    whole: bool = True  # whether no reset can be missing


@dataclass(frozen=True)
class _Line:
    run_step: int
    step: int  # of the optimizer
    phase: str
    t: int  # steps since the warm-up; 0 in it
    to_reset: int | None


def phases_of(run: Run) -> Phases | None:
    """None where no step line has Neumann's diagnostics."""
    lines = list(_lines(run))
    if not lines:
        return None
    timetable = _timetable(run)
    whole = timetable is not None and all(_agrees(timetable, line) for line in lines)
    known = _said(lines)
    if timetable is not None and whole:
        known = set(_resets(timetable, lines[-1].step))
    # Before its first reset a run has only warmed up.
    warmup = min(known, default=lines[-1].step + 1) - 1
    reached = sorted(step for step in known if step <= lines[-1].step)
    return Phases(
        min(_run_step(warmup, lines), lines[-1].run_step),
        tuple(_run_step(step, lines) for step in reached),
        whole,
    )


def _lines(run: Run) -> Iterator[_Line]:
    for line in run.lines:
        found = line.get("optimizer")
        if isinstance(found, dict) and isinstance(found.get("step"), int) and "phase" in found:
            to_reset = found.get("steps_to_reset")
            yield _Line(
                step_of(line),
                found["step"],
                str(found["phase"]),
                found["t"] if isinstance(found.get("t"), int) else 0,
                to_reset if isinstance(to_reset, int) else None,
            )


def _timetable(run: Run) -> Timetable | None:
    """As the arm's options have it; None where they cannot be understood."""
    try:
        arm = Arm.parse(str(run.config.get("opt")))
        given = {
            name: parameter.default
            for name, parameter in inspect.signature(Neumann).parameters.items()
        } | dict(arm.options)
        given = in_steps(completed(given), given["steps_per_epoch"] or run.steps_per_epoch)
        return Timetable(given["warmup_steps"], given["reset_steps"], float(given["reset_growth"]))
    except (UsageError, TypeError, ValueError):
        return None


def _agrees(timetable: Timetable, line: _Line) -> bool:
    warmup = timetable.warmup_steps
    following = timetable.next_reset(line.step + 1 - warmup)
    expected = None if following is None else following + warmup - line.step
    return timetable.place(line.step).phase == line.phase and expected == line.to_reset


def _said(lines: list[_Line]) -> set[int]:
    """The resets that the lines name, in the optimizer's steps."""
    coming = {line.step + line.to_reset for line in lines if line.to_reset is not None}
    first = {line.step - line.t + 1 for line in lines if line.t > 0}  # t = 1 resets
    return coming | first | {line.step for line in lines if line.phase == Phase.RESET}


def _resets(timetable: Timetable, last: int) -> Iterator[int]:
    """Also the first one after `last`, if it ends the warm-up."""
    t: int | None = 1
    while t is not None and (t == 1 or t + timetable.warmup_steps <= last):
        yield t + timetable.warmup_steps
        t = timetable.next_reset(t + 1)


def _run_step(step: int, lines: list[_Line]) -> int:
    """The run's step in which the optimizer's clock came to `step`, by the first line after it."""
    after = next((line for line in lines if line.step >= step), lines[-1])
    return step + after.run_step - after.step
