"""A comparison as a table in the terminal."""

from rich.table import Table

from neumann.lab.comparison import Comparison, Row
from neumann.lab.statistics import Difference, Interval


def table(comparison: Comparison) -> Table:
    """Mean, interval and paired difference of each arm; steps to the target if there is one."""
    first, target = comparison.rows[0], comparison.target
    made = Table(box=None, pad_edge=False)
    made.add_column("arm", no_wrap=True)
    titles = ["seeds", "accuracy, %", f"{first.arm} ahead by", "p", "seconds"]
    if target is not None:
        titles += [f"steps to {target:g} %", "epochs"]
    for title in titles:
        made.add_column(title, justify="right", no_wrap=True)
    for row in comparison.rows:
        cells = [
            row.arm,
            str(len(row.runs)),
            _interval(row.accuracy),
            _difference(row.difference),
            "" if row.difference is None or row.difference.p is None else f"{row.difference.p:.2g}",
            "–" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        if target is not None:
            cells += _to_target(row)
        made.add_row(*cells)
    return made


def _interval(interval: Interval) -> str:
    if interval.mean is None:
        return "diverged"
    text = f"{interval.mean:.2f}"
    if interval.low is not None and interval.high is not None:
        text += f" ± {(interval.high - interval.low) / 2:.2f}"
    return text + (f" ({interval.diverged} diverged)" if interval.diverged else "")


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.mean is None:
        return "–"
    text = f"{difference.mean:+.2f}"
    if difference.low is not None and difference.high is not None:
        text += f" ± {(difference.high - difference.low) / 2:.2f}"
    return text


def _to_target(row: Row) -> list[str]:
    """Steps and epochs to the target, means over the seeds that reached it."""
    runs = row.runs.values()
    reached = [run for run in runs if run.steps_to_target is not None]
    if not reached:
        return ["never", ""]
    steps = sum(run.steps_to_target or 0 for run in reached) / len(reached)
    epochs = sum(run.epochs_to_target or 0 for run in reached) / len(reached)
    missed = len(runs) - len(reached)
    return [f"{steps:.0f}" + (f" ({missed} never)" if missed else ""), f"{epochs:.1f}"]
