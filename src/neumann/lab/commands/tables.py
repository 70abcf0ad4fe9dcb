"""Tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from neumann.lab.metrics import Metric
from neumann.lab.report.formatting import format_interval, format_p_value
from neumann.lab.report.result_tables import describe_extra, describe_target
from neumann.lab.studies.lr_sweep import ArmSearch
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.statistics import Interval
from neumann.lab.studies.wording import describe_warmup_of_arm

WIDEST = 10_000  # characters of a line


def make_table(*titles: str | Text, left: int = 1) -> Table:
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
    target = comparison.target
    short = [row.arm.partition(":")[0] for row in comparison.rows]
    first = comparison.rows[0].arm if short.count(short[0]) > 1 else short[0]
    metric = comparison.metric
    titles: list[str | Text] = ["\narm", "\nseeds", f"{metric.name}\n{metric.unit}"]
    titles += [f"\n{extra.label}" for extra in comparison.extras]
    titles += [Text(f"{first}\nahead by"), "\np", "training\nseconds"]
    if target is not None:
        titles += [f"steps to\n{metric.format_target(target)}", "\nepochs"]
    table = make_table(*titles)
    for row in comparison.rows:
        cells = [
            row.arm,
            str(len(row.runs)),
            format_score(row.score, metric),
            *(describe_extra(row, extra) for extra in comparison.extras),
            "" if row.difference is None else format_interval(row.difference, metric, signed=True),
            "" if row.difference is None else format_p_value(row.difference),
            "–" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        if target is not None:
            steps, epochs = describe_target(list(row.runs.values()))
            cells += [f"{steps.text} ({steps.note})" if steps.note else steps.text, epochs.text]
        table.add_row(*map(Text, cells))
    return table


def tabulate_search(found: Sequence[ArmSearch]) -> Table:
    """The score of each arm at each learning rate; the chosen ones have a star."""
    searched = [arm for arm in found if arm.lrs]
    table = make_table("", "", *("" for _ in searched[0].lrs), left=2)
    table.show_header = False
    for arm in searched:
        scores = []
        for lr, score in zip(arm.lrs, arm.scores, strict=True):
            chosen = lr == arm.best
            text = _format_search_score(score, arm.metric) + ("*" if chosen else " ")
            scores.append(Text(text, style="bold" if chosen else ""))
        table.add_row(Text(arm.name), "lr", *(f"{lr:g} " for lr in arm.lrs))
        table.add_row("", arm.metric.unit.partition(" ")[0], *scores)
    return table


def list_search_notes(found: Sequence[ArmSearch]) -> list[str]:
    """What the table does not say: unbracketed winners, arms that diverged, and warm-ups."""
    notes = [f"* chosen, by the mean {found[0].metric.name} on held-out data"]
    for arm in found:
        if arm.best is None:
            notes.append(f"{arm.name} diverged at every learning rate and is left out")
        elif arm.lrs and not arm.bracketed:
            end = "smallest" if arm.best == arm.lrs[0] else "largest"
            notes.append(
                f"{arm.name}: {arm.best:g} is the {end} lr it tried, so the best is not bracketed: "
                "widen --lr"
            )
        if arm.long_warmup is not None:
            notes.append(f"{describe_warmup_of_arm(arm.name, arm.long_warmup)} in the search")
    return notes


def _format_search_score(score: Interval, metric: Metric) -> str:
    if score.mean is None:
        return "diverged"
    return metric.format(score.mean) + (f" ({score.diverged} div.)" if score.diverged else "")


def format_score(score: Interval, metric: Metric) -> str:
    if score.diverged and score.mean is None:
        return "diverged"
    suffix = f" ({score.diverged} diverged)" if score.diverged else ""
    return format_interval(score, metric) + suffix
