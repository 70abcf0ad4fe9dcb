"""What a comparison and a search have found, as tables in the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from neumann.lab.commands.arm_legend import list_full_names, list_searched, name_searched
from neumann.lab.commands.terminal import (
    make_table,
    measure_table,
    open_console,
    print_names,
    print_sentences,
    print_table,
)
from neumann.lab.contenders import Contender
from neumann.lab.metrics import Metric
from neumann.lab.report.formatting import format_interval, format_p_value
from neumann.lab.report.result_tables import MAX_NAME, describe_extra, describe_target
from neumann.lab.studies.lr_sweep import ArmSearch
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.statistics import Interval
from neumann.lab.studies.wording import describe_warmup_of_arm


def print_comparison(comparison: Comparison) -> None:
    """Print the table, what its names stand for, and the verdicts."""
    print_table(tabulate_comparison(comparison), spare=_list_spare(comparison))
    print_names(list_full_names(comparison))
    print_sentences([*comparison.state_verdicts(), *comparison.state_notes()])


def tabulate_comparison(comparison: Comparison) -> Table:
    """Mean, interval and paired difference of each arm, and the steps to the target if any."""
    target = comparison.target
    first = comparison.rows[0].arm
    first = first if len(first) <= MAX_NAME else "the first"
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


def _list_spare(comparison: Comparison) -> list[int]:
    """The columns that a narrow terminal leaves out, the least important first.

    The sentences below the table have p and the seeds too, and epochs follow from steps.
    """
    seeds, extras = 1, range(3, 3 + len(comparison.extras))
    p, seconds, steps, epochs = range(extras.stop + 1, extras.stop + 5)
    if comparison.target is None:
        return [p, *extras, seeds, seconds]
    return [epochs, p, *extras, seeds, seconds, steps]


def print_search(found: Sequence[ArmSearch], file: Path | None = None) -> None:
    """Print the scores, what the names stand for, and notes; `file` is that of the study."""
    console, table = open_console(), tabulate_search(found)
    if console.is_terminal and measure_table(table, console) > console.width:
        for line in list_search_lines(found, console.width):
            console.print(line)
    else:
        print_table(table)
    print_names(list_searched(found))
    print_sentences([*list_search_notes(found, file), ""])


def tabulate_search(found: Sequence[ArmSearch]) -> Table:
    """The score of each arm at each learning rate; the chosen ones have a star."""
    searched, names = [arm for arm in found if arm.lrs], name_searched(found)
    table = make_table("", "", *("" for _ in searched[0].lrs), left=2)
    table.show_header = False
    for arm in searched:
        table.add_row(Text(names[arm.name]), "lr", *_list_lrs(arm))
        table.add_row("", _shorten_unit(arm.metric), *_list_scores(arm))
    return table


def list_search_lines(found: Sequence[ArmSearch], width: int) -> list[Text]:
    """The same for a narrow terminal: each arm's name above its learning rates."""
    searched, names = [arm for arm in found if arm.lrs], name_searched(found)
    margin, unit_width = 2, max(len("lr"), *(len(_shorten_unit(arm.metric)) for arm in searched))
    widest = max(len(cell) for arm in searched for cell in (*_list_lrs(arm), *_list_scores(arm)))
    at_once = max(1, (width - margin - unit_width) // (2 + widest))

    def line(title: str, cells: Iterable[Text]) -> Text:
        start = Text(f"{'':{margin}}{title:{unit_width}}")
        return start.append_text(Text().join(Text(" " * (2 + widest - len(c))) + c for c in cells))

    lines = []
    for arm in searched:
        lines.append(Text(names[arm.name]))
        lrs, scores = _list_lrs(arm), _list_scores(arm)
        for start in range(0, len(lrs), at_once):
            part = slice(start, start + at_once)
            lines.append(line("lr", lrs[part]))
            lines.append(line(_shorten_unit(arm.metric), scores[part]))
    return lines


def _list_lrs(arm: ArmSearch) -> list[Text]:
    return [Text(f"{lr:g} ") for lr in arm.lrs]


def _list_scores(arm: ArmSearch) -> list[Text]:
    scores = []
    for lr, score in zip(arm.lrs, arm.scores, strict=True):
        chosen = lr == arm.best
        text = _format_search_score(score, arm.metric) + ("*" if chosen else " ")
        scores.append(Text(text, style="bold" if chosen else ""))
    return scores


def _shorten_unit(metric: Metric) -> str:
    return metric.unit.partition(" ")[0]


def list_search_notes(found: Sequence[ArmSearch], file: Path | None = None) -> list[str]:
    """What the table does not say: unbracketed winners, arms that diverged, and warm-ups."""
    notes = [f"* chosen, by the mean {found[0].metric.name} on held-out data"]
    names = name_searched(found)
    for arm in found:
        name = names[arm.name]
        if arm.best is None:
            notes.append(f"{name} diverged at every learning rate and is left out")
        elif arm.lrs and not arm.bracketed:
            end = "smallest" if arm.best == arm.lrs[0] else "largest"
            notes.append(
                f"{name}: {arm.best:g} is the {end} lr it tried, so the best is not bracketed: "
                f"{_advise_range(arm, file)}"
            )
        if arm.long_warmup is not None:
            notes.append(f"{describe_warmup_of_arm(name, arm.long_warmup)} in the search")
    return notes


def _advise_range(arm: ArmSearch, file: Path | None) -> str:
    """How to widen the range of an arm: in the file of a study, in the arm, or for all arms."""
    if file is not None:
        return f"widen the range of lr in {file}, and use another --output"
    has_own = "lr" in dict(Contender.parse(arm.arm).arm.options)
    return "widen the range in its options" if has_own else "widen --lr"


def _format_search_score(score: Interval, metric: Metric) -> str:
    if score.mean is None:
        return "diverged"
    return metric.format(score.mean) + (f" ({score.diverged} div.)" if score.diverged else "")


def format_score(score: Interval, metric: Metric) -> str:
    if score.diverged and score.mean is None:
        return "diverged"
    suffix = f" ({score.diverged} diverged)" if score.diverged else ""
    return format_interval(score, metric) + suffix
