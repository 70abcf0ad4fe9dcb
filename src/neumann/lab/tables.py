"""Comparisons and sweeps as tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from neumann.lab.comparison import Comparison, Row, warmup_note
from neumann.lab.statistics import Difference, Interval
from neumann.lab.sweep import Searched

WIDEST = 10_000  # characters of a line


def table(comparison: Comparison) -> Table:
    """Mean, interval and paired difference of each arm; steps to the target if there is one."""
    first, target = comparison.rows[0], comparison.target
    made = Table(box=None, pad_edge=False)
    made.add_column("\narm", no_wrap=True)
    ahead = Text(f"{first.arm.partition(':')[0]}\nahead by")
    titles: list[str | Text] = ["\nseeds", "accuracy\n%", ahead, "\np", "training\nseconds"]
    if target is not None:
        titles += [f"steps to\n{target:g} %", "\nepochs"]
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
        made.add_row(*map(Text, cells))
    return made


def print_table(made: Table, sentences: Sequence[str]) -> None:
    """To standard output, whole: where the terminal is too narrow it may break lines."""
    console = Console(highlight=False, markup=False)
    wide = console.options.update_width(WIDEST)
    console.width = max(console.width, console.measure(made, options=wide).maximum)
    console.print(made)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def search_table(found: Sequence[Searched]) -> Table:
    """Held-out accuracy of each arm at each learning rate; the one chosen has a star."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    for _ in found[0].lrs:
        made.add_column(justify="right", no_wrap=True)
    for each in found:
        scores = []
        for lr, score in zip(each.lrs, each.scores, strict=True):
            chosen = lr == each.best
            text = _mean(score) + ("*" if chosen else " ")
            scores.append(Text(text, style="bold" if chosen else ""))
        made.add_row(Text(each.name), "lr", *(f"{lr:g} " for lr in each.lrs))
        made.add_row("", "%", *scores)
    return made


def search_notes(found: Sequence[Searched]) -> list[str]:
    """What the table cannot say: where a better learning rate may lie outside, and who diverged."""
    notes = ["* chosen, by the mean accuracy on the held-out tenth of the training set"]
    for each in found:
        if each.best is None:
            notes.append(f"{each.name} diverged at every learning rate and is left out")
        elif not each.bracketed:
            end = "smallest" if each.best == each.lrs[0] else "largest"
            notes.append(
                f"{each.name}: {each.best:g} is the {end} lr it tried, so the best is not "
                "bracketed: widen --lr"
            )
        if each.warmup is not None:
            notes.append(f"{warmup_note(each.name, each.warmup)} in the search")
    return notes


def _mean(interval: Interval) -> str:
    if interval.mean is None:
        return "diverged"
    return f"{interval.mean:.2f}" + (f" ({interval.diverged} div.)" if interval.diverged else "")


def _interval(interval: Interval) -> str:
    if interval.mean is None:
        return "diverged" if interval.diverged else "–"
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
