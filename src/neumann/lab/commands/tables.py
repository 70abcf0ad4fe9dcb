"""Tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from neumann.lab.studies.results import ArmResult, Comparison
from neumann.lab.studies.statistics import Difference, Interval

WIDEST = 10_000  # characters of a line


def plain_table(*titles: str | Text, left: int = 1) -> Table:
    """An empty table without lines; columns after the first `left` are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < left else "right", no_wrap=True)
    return table


def print_table(table: Table, sentences: Sequence[str]) -> None:
    """Print a table and then sentences. Nothing is cut; a narrow terminal may break lines."""
    console = Console(highlight=False, markup=False)
    wide = console.options.update_width(WIDEST)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    sentences = [*comparison.state_verdicts(), *comparison.state_notes()]
    print_table(tabulate_comparison(comparison), sentences)


def tabulate_comparison(comparison: Comparison) -> Table:
    """Mean, interval and paired difference of each arm, and the steps to the target if any."""
    first, target = comparison.rows[0].arm.partition(":")[0], comparison.target
    titles: list[str | Text] = ["\narm", "\nseeds", "accuracy\n%", Text(f"{first}\nahead by")]
    titles += ["\np", "training\nseconds"]
    if target is not None:
        titles += [f"steps to\n{target:g} %", "\nepochs"]
    table = plain_table(*titles)
    for row in comparison.rows:
        p = None if row.difference is None else row.difference.p
        cells = [
            row.arm,
            str(len(row.runs)),
            _format_accuracy(row.accuracy),
            "" if row.difference is None else _format_mean(row.difference, "+.2f"),
            "" if p is None else f"{p:.2g}",
            "–" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        if target is not None:
            cells += _to_target(row)
        table.add_row(*map(Text, cells))
    return table


def _format_accuracy(accuracy: Interval) -> str:
    if accuracy.diverged and accuracy.mean is None:
        return "diverged"
    suffix = f" ({accuracy.diverged} diverged)" if accuracy.diverged else ""
    return _format_mean(accuracy, ".2f") + suffix


def _format_mean(found: Interval | Difference, spec: str) -> str:
    if found.mean is None:
        return "–"
    text = format(found.mean, spec)
    if found.low is not None and found.high is not None:
        text += f" ± {(found.high - found.low) / 2:.2f}"
    return text


def _to_target(row: ArmResult) -> list[str]:
    """Steps and epochs to the target, averaged over the seeds that reached it."""
    runs = row.runs.values()
    reached = [run for run in runs if run.steps_to_target is not None]
    if not reached:
        return ["never", ""]
    steps = sum(run.steps_to_target or 0 for run in reached) / len(reached)
    epochs = sum(run.epochs_to_target or 0 for run in reached) / len(reached)
    missed = len(runs) - len(reached)
    return [f"{steps:.0f}" + (f" ({missed} never)" if missed else ""), f"{epochs:.1f}"]
