"""`neumann sweep`: choose each learning rate on held-out data, then compare the winners."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from neumann.lab.commands.compare import refuse_torchrun
from neumann.lab.commands.progress import show_study
from neumann.lab.commands.report import print_report
from neumann.lab.commands.tables import make_table, print_comparison, print_table
from neumann.lab.metrics import Metric
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.studies.lr_sweep import ArmSearch, compare_winners, search
from neumann.lab.studies.settings import SweepConfig
from neumann.lab.studies.statistics import Interval
from neumann.lab.studies.wording import describe_long_warmup


def run(config: SweepConfig) -> None:
    refuse_torchrun("sweep")
    folder = config.output or new_run_folder(config.title)
    with show_study("search") as observer:
        found = search(config, folder, observer)
    print_table(tabulate_search(found), [*search_notes(found), ""])
    with show_study("final") as observer:
        comparison = compare_winners(config, folder, found, observer)
    print_comparison(comparison)
    print_report(folder)


def tabulate_search(found: Sequence[ArmSearch]) -> Table:
    """The score of each arm at each learning rate; the chosen ones have a star."""
    searched = [arm for arm in found if arm.lrs]
    table = make_table("", "", *("" for _ in searched[0].lrs), left=2)
    table.show_header = False
    for arm in searched:
        scores = []
        for lr, score in zip(arm.lrs, arm.scores, strict=True):
            chosen = lr == arm.best
            text = _format_score(score, arm.metric) + ("*" if chosen else " ")
            scores.append(Text(text, style="bold" if chosen else ""))
        table.add_row(Text(arm.name), "lr", *(f"{lr:g} " for lr in arm.lrs))
        table.add_row("", arm.metric.unit.partition(" ")[0], *scores)
    return table


def search_notes(found: Sequence[ArmSearch]) -> list[str]:
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
            notes.append(f"{describe_long_warmup(arm.name, arm.long_warmup)} in the search")
    return notes


def _format_score(score: Interval, metric: Metric) -> str:
    if score.mean is None:
        return "diverged"
    return metric.format(score.mean) + (f" ({score.diverged} div.)" if score.diverged else "")
