"""The table, the figures and the page of the claims."""

import math
import random
from pathlib import Path

import pytest

from benchmarks.common.ledger import Ledger
from benchmarks.common.pages import list_parts
from benchmarks.paper.claim_tests import (
    Source,
    count_seeds,
)
from benchmarks.paper.claims import CLAIMS, CLAIMS_ON_TEST_SET
from benchmarks.paper.draw_figures import draw_all
from benchmarks.paper.judge_claims import PAGE
from benchmarks.paper.judging import Verdict
from benchmarks.paper.run_lines import (
    Results,
    RunKey,
    name_point,
)
from benchmarks.paper.run_tables import (
    tabulate_ablations,
    tabulate_epochs,
    tabulate_main,
    tabulate_scaling,
)
from benchmarks.paper.verdict_table import (
    KIND,
    count_verdicts,
    fill_page,
    format_rows,
    judge_claims,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def invented(tmp_path):
    """All runs that the claims name: Neumann is as good as Nesterov, both lose at large batches."""
    sources = {source for claim in CLAIMS for test in claim.tests for source in test.sources}
    sources |= {Source("krylov", arm) for arm in ("neumann", "cg Gauss-Newton", "cg Hessian")}
    for source in sorted(sources, key=repr):
        ledger = Ledger(tmp_path / f"{source.study}.jsonl", RunKey)
        chance = random.Random(repr(source))
        values = dict(part.split("=") for part in source.point.split(",") if part)
        for seed in range(count_seeds(source.study)):
            score = 94 - 2 * math.log2(int(values.get("batch_size", 512)) / 512)
            score += math.log2(int(values.get("epochs", 60)) / 60) + chance.gauss(0, 0.1)
            score -= 3 * (source.arm == "adam")
            run = {"score": score, "loss": 0.2, "train_loss": 0.1, "seconds": 10.0, "lr": 0.1}
            run["curve"] = [score - 10 + k % 3 for k in range(9)]
            run["train_loss_curve"] = [1.0, 0.5, 0.1]
            run["forces"] = [[share, 1.0 - share, 0.5, 9.0] for share in (0.1, 0.5, 0.9)]
            ledger.add(RunKey("final", source.point, source.arm, seed), run)
    return Results(tmp_path)


def test_with_all_runs_every_row_has_a_verdict(invented):
    rows = judge_claims(invented)
    verdicts = {row.claim.number: row.verdict for row in rows}
    assert [n for n, verdict in verdicts.items() if verdict == Verdict.NOT_RUN] == [19]
    for number in (1, 2, 3):
        assert verdicts[number] == Verdict.NOT_SUPPORTED, rows[number - 1]
    assert verdicts[7] == Verdict.SUPPORTED
    assert verdicts[11] == Verdict.SUPPORTED
    page = fill_page(PAGE.read_text(), rows, invented)
    assert page.count("### ") == 28
    assert fill_page(page, rows, invented) == page


@pytest.mark.parametrize("number", [claim.number for claim in CLAIMS if claim.tests])
def test_an_arm_that_diverged_at_every_rate_does_not_stop_the_page(invented, number):
    """As `collect_runs` writes it: without any setting."""
    claim = next(claim for claim in CLAIMS if claim.number == number)
    for source in claim.tests[0].sources:
        lost = Results(invented.folder)
        for seed in range(count_seeds(source.study)):
            key = RunKey("final", source.point, source.arm, seed)
            lost.open(source.study).runs[key] = {"diverged": True}
        rows = judge_claims(lost)
        fill_page(PAGE.read_text(), rows, lost)


def test_tables_of_the_runs(tmp_path):
    results = Results(tmp_path)
    for tabulate in (tabulate_main, tabulate_scaling, tabulate_epochs, tabulate_ablations):
        assert tabulate(results) == "No runs yet."
    main = Ledger(tmp_path / "main-cifar10.jsonl", RunKey)
    for seed, score in enumerate((94.0, 94.2, None)):
        result = {"diverged": True} if score is None else {"score": score, "train_loss": 0.05}
        main.add(RunKey("final", "", "nesterov", seed), {"lr": 0.4, **result})
    row = "| CIFAR-10 | Nesterov SGD | 94.10 ± 1.27, 1 diverged | 0.14 | 0.0500 | 0.4 | 2 |"
    assert tabulate_main(Results(tmp_path)).splitlines()[2:] == [row]
    shorter, longest = (
        Ledger(tmp_path / f"{n}.jsonl", RunKey) for n in ("scaling-epochs", "scaling")
    )
    for batch, lost in ((512, 0.0), (2048, 1.0), (8192, 9.0)):
        for epochs in (15, 30, 60):
            score = 92 + math.log2(epochs / 30) - lost
            ledger, axes = (longest, {}) if epochs == 60 else (shorter, {"epochs": epochs})
            key = RunKey("final", name_point(batch_size=batch, **axes), "nesterov", 0)
            ledger.add(key, {"score": score, "steps": epochs * (50_000 // batch)})
    results = Results(tmp_path)
    assert tabulate_scaling(results).splitlines()[2:] == [
        "| Nesterov SGD | 93.00 | 92.00 | 84.00 |  |",
        "| steps of a run | 5,820 | 1,440 | 360 |  |",
    ]
    assert tabulate_epochs(results).splitlines()[0].startswith("| epochs to 92.00 % |")
    assert tabulate_epochs(results).splitlines()[2:] == [
        "| Nesterov SGD | 30.0 | 60.0 | more than 60 |  |"
    ]


def test_all_arms_of_the_ablations_are_listed(tmp_path):
    ledger = Ledger(tmp_path / "clipping.jsonl", RunKey)
    for seed, score in enumerate((1.5, 1.52, None)):
        result = {"diverged": True} if score is None else {"score": score}
        key = RunKey("final", name_point(clip_grad=0.05), "adam", seed)
        ledger.add(key, {"lr": 0.002, **result})
    ledger.add(RunKey("search", "", "adam at 0.002", 0), {"lr": 0.002, "score": 1.5})
    Ledger(tmp_path / "warm-up.jsonl", RunKey).add(
        RunKey("final", "", "none", 0), {"lr": 0.4, "score": 94.0}
    )
    assert tabulate_ablations(Results(tmp_path)).splitlines()[2:] == [
        "| warm-up | none | 94.00 | 0.4 | 1 |",
        "| clipping | adam (clip_grad=0.05) | 1.51 ± 0.13, 1 diverged | 0.002 | 2 |",
    ]


def test_figures_of_the_runs_that_are_there(invented, tmp_path):
    rows, page = judge_claims(invented), PAGE.read_text()
    assert "to come, in the form of the paper's: 1, 2, 3, 5 and 6" in fill_page(
        page, rows, invented
    )
    assert draw_all(tmp_path / "empty") == []
    drawn = draw_all(tmp_path)
    assert [path.name for path in drawn] == [f"figure-{number}.png" for number in (1, 2, 3, 5, 6)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    filled = fill_page(page, rows, invented)
    assert filled.count("](../results/paper/figure-") == 5
    assert "to come" not in filled


def test_without_results_all_rows_are_there(tmp_path):
    rows = judge_claims(Results(tmp_path))
    table = format_rows(rows).splitlines()
    assert len(table) == 2 + 28
    assert table[5].startswith("| 4 | Fewer steps to the same accuracy | shorter-runs |")
    assert all(line.count("|") == 6 for line in table)
    verdicts = {row.claim.number: row.verdict for row in rows}
    assert {n for n in CLAIMS_ON_TEST_SET if verdicts[n] != Verdict.NOT_RUN} == set()
    assert verdicts[28] == Verdict.NOT_TESTABLE
    assert count_verdicts(rows).startswith(
        "Of 28 claims: 1 supported, 3 not supported, 2 inconclusive"
    )


def test_the_page_is_up_to_date():
    """If this fails, run python -m benchmarks.paper.judge_claims --update."""
    page = PAGE.read_text()
    assert set(list_parts(page, KIND)) == {
        "count",
        "table",
        "main",
        "scaling",
        "epochs",
        "ablations",
        "figures",
        "claims",
    }
    results = Results(ROOT / "results/paper")
    assert fill_page(page, judge_claims(results), results) == page
