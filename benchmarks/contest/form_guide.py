"""The table of forms in README: when to use each, what to start with, and what it reached.

The accuracies are those of the contest at batch 8192, each form beside the optimizer that it is
closest to, and that of the untuned recipe in its last test against a tuned Muon. The contest tuned
AdamW, beside which it put the diagonal form, in fewer steps than the test has. A search in as many
steps, for the test of the recipe, found better settings, so the table shows what those reached.
The seeds differ, so this has no p.
"""

from collections.abc import Sequence

from benchmarks.common.markdown import format_table
from benchmarks.contest.entrants import ContestLedger, RunKey
from benchmarks.contest.image_families import (
    BEST_PEER,
    OTHER_FORMS,
    RECIPE_SEEDS,
    SPECTRAL,
    Comparison,
    Family,
)
from benchmarks.contest.recipe_overview import average_accuracy
from benchmarks.contest.recipe_runs import BATCH, OURS
from benchmarks.contest.summary import BatchSummary, find_tested
from neumann.lab.optimizers.arm_recipes import PRECONDITIONED
from neumann.optim.recipe import LR

BETTER_PEERS = {"Neumann diagonal": "LAMB"}  # shown too, where a form's rival is not the best
TUNED_LONGER = frozenset({"AdamW"})  # the recipe's test has it at better settings than the contest
HEADS = ("form", "use it", "start with")
GUIDE = {
    SPECTRAL: (
        "**spectral**: `large_batch`",
        "for large batches and few steps",
        f"lr {LR:g}; schedule and decay are included",
    ),
    "Neumann diagonal": (
        '**diagonal**: `precondition="diagonal"`',
        "where matrices cannot be orthogonalized",
        f"lr {PRECONDITIONED['diagonal'].lr:g}, decay 1; ramp, then linear to 0",
    ),
    "Neumann (paper)": (
        "**paper**: `neumann.Neumann`",
        "to study the paper",
        "lr {lowest:g} to {highest:g}; schedule and decay of Nesterov SGD",
    ),
}


def format_guide(summaries: Sequence[BatchSummary], recipe: ContestLedger, family: Family) -> str:
    """One row per form: its accuracy, that of its rival, and p of the difference."""
    contest = next(summary for summary in summaries if summary["batch"] == BATCH)
    means = {row["entrant"]: row["interval"]["mean"] for row in contest["rows"]}
    corrected = family.correct()

    def format_p(found: Comparison) -> str:
        return f", p = {corrected[found]:.2g}"

    tested = Comparison(*(find_recipe_test(recipe, name) for name in (OURS, BEST_PEER)))
    averages = [average_accuracy(recipe, key.entrant) for key in tested]
    scores = {
        SPECTRAL: f"{averages[0]:.2f} untuned; {BEST_PEER} {averages[1]:.2f}{format_p(tested)}"
    }
    for ours, rival in OTHER_FORMS.items():
        if rival in TUNED_LONGER:
            theirs, p = average_accuracy(recipe, rival), ""
        else:
            found = Comparison(find_tested(contest, ours), find_tested(contest, rival))
            theirs, p = means[rival], format_p(found)
        scores[ours] = f"{means[ours]:.2f}; {rival} {theirs:.2f}{p}"
        if better := BETTER_PEERS.get(ours):
            scores[ours] += f", {better} {means[better]:.2f}"
    heads = (*HEADS, f"accuracy, % (batch {BATCH})")
    rows = [
        (name, use, start.format_map(find_lrs(summaries, form)), scores[form])
        for form, (name, use, start) in GUIDE.items()
    ]
    return format_table(heads, "llll", rows)


def find_lrs(summaries: Sequence[BatchSummary], entrant: str) -> dict[str, float]:
    """The lowest and the highest learning rate that the contest chose, over all batch sizes."""
    rows = (row for summary in summaries for row in summary["rows"] if row["entrant"] == entrant)
    lrs = sorted(row["setting"]["lr"] for row in rows)
    return {"lowest": lrs[0], "highest": lrs[-1]}


def find_recipe_test(ledger: ContestLedger, entrant: str) -> RunKey:
    """What identifies the runs of the recipe or a peer in the last test, at its first seed."""
    return next(
        key
        for key in ledger.runs
        if (key.stage, key.entrant, key.seed) == ("final", entrant, RECIPE_SEEDS[-1].start)
    )
