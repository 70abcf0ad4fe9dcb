"""The list of claims, and verdicts on invented runs."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.common.ledger import Ledger
from benchmarks.paper import claim_tests
from benchmarks.paper.claim_tests import (
    Contrast,
    Equivalence,
    Source,
    Spread,
    count_seeds,
    get_loss,
)
from benchmarks.paper.claims import CLAIMS, CLAIMS_ON_TEST_SET
from benchmarks.paper.judging import Verdict
from benchmarks.paper.run_lines import (
    Results,
    RunKey,
)
from benchmarks.paper.settled import (
    compare_forces,
    count_negative,
    follow_smallest,
    judge_growth,
    race_conjugate_gradients,
)
from benchmarks.paper.verdict_table import find_edge, format_section, judge_claims
from neumann.lab.studies.study_toml import read_study_toml
from tests.support.invented_claims import make_claim

ROOT = Path(__file__).parents[2]


def test_all_claims_are_listed_once():
    assert [claim.number for claim in CLAIMS] == list(range(1, 29))
    for claim in CLAIMS:
        assert bool(claim.tests) != bool(claim.measure), claim.number
        assert claim.title.isascii()  # GitHub and the site make other anchors of other letters


def test_p_is_corrected_over_exactly_the_claims_that_touch_the_test_set():
    touching = tuple(claim.number for claim in CLAIMS if claim.touches_test_set)
    assert touching == CLAIMS_ON_TEST_SET
    assert len(touching) == 18


def test_claims_name_runs_that_the_studies_plan(tmp_path):
    sources = {source for claim in CLAIMS for test in claim.tests for source in test.sources}
    planned = set()
    for study in {source.study for source in sources}:
        found = read_study_toml(ROOT / f"studies/paper/{study}.toml", tmp_path)
        for point in found.points:
            name = "" if point.folder == tmp_path else point.folder.name
            arms = [arm.partition("=")[0] for arm in point.config.arms]
            planned |= {Source(study, arm, name) for arm in arms}
            assert point.config.seeds == count_seeds(study)
    assert sources - planned == set()


# ---------------------------------------------------------------------- verdicts on invented runs


AHEAD = Contrast(Source("one", "neumann"), Source("one", "base"), claimed=0.8)


def test_seeds_that_are_missing_are_counted(study, tmp_path):
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert (row.verdict, row.figure) == (Verdict.NOT_RUN, "one: 0 of 5 seeds")
    study("neumann", [94.0] * 5)
    study("base", [93.0] * 3)
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert (row.verdict, row.figure) == (Verdict.NOT_RUN, "one: 3 of 5 seeds")


def test_pairs_of_a_seed_are_compared(study, tmp_path):
    """The seeds differ by points, the pairs by less than a tenth."""
    study("neumann", [91.00, 92.05, 93.0, 94.1, 95.0])
    study("base", [90.05, 91.05, 91.95, 93.0, 94.1])
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert row.verdict == Verdict.SUPPORTED
    assert row.figure == (
        "one: neumann − base: +1.00 [+0.90, +1.10] points, n = 5, corrected p < 0.001"
    )


def test_a_share_of_the_error_can_be_the_claimed_effect(study, tmp_path):
    """0.14 ± 0.09 points exclude 0.8 points, but not 3.8 % of an error of 5 %."""
    study("neumann", [95.05, 95.15, 95.25, 95.1, 95.15])
    study("base", [95.0] * 5)
    by_points = make_claim(1, AHEAD)
    by_share = make_claim(1, dataclasses.replace(AHEAD, claimed_share=0.038))
    assert judge_claims(Results(tmp_path), [by_points])[0].verdict == Verdict.SMALLER
    assert judge_claims(Results(tmp_path), [by_share])[0].verdict == Verdict.SUPPORTED


def test_a_claim_is_judged_beside_the_others(study, tmp_path):
    """p = 0.047 is good evidence for one claim alone, and weak for one of two."""
    study("neumann", [94.0, 94.2, 94.4, 94.1, 94.8])
    study("base", [93.9] * 5)
    single = dataclasses.replace(AHEAD, claimed=0.2)
    other = Contrast(Source("one", "neumann"), Source("one", "other"))
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, single)])
    assert (row.words, row.figure[-9:]) == ("supported", "p = 0.047")
    row, waiting = judge_claims(Results(tmp_path), [make_claim(1, single), make_claim(2, other)])
    assert (row.words, row.figure[-9:]) == ("supported (weak)", "p = 0.095")
    assert waiting.verdict == Verdict.NOT_RUN


def test_an_arm_that_diverged_is_named(study, tmp_path):
    study("neumann", [94.0, 94.1, None, 94.1, 94.0])
    study("base", [93.0, 93.2, 93.1, 93.0, 93.1])
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert row.verdict == Verdict.INCONCLUSIVE
    assert "n = 4" in row.figure
    assert row.notes == ("1 run diverged",)


def test_seeds_that_the_other_arm_lost_are_named(study, tmp_path):
    study("neumann", [94.0, 94.2, 94.4, 94.1, 94.8])
    study("base", [93.0, None, 93.1, None, 93.1])
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert "n = 3" in row.figure
    assert row.notes == ("2 runs of the other arm diverged, so their seeds are left out",)


def test_an_arm_that_always_diverged(study, tmp_path):
    """Ours speaks against the claim; of the other there is nothing to compare with."""
    study("neumann", [None] * 5)
    study("base", [93.0, 93.2, 93.1, 93.0, 93.1])
    share = dataclasses.replace(AHEAD, claimed_share=0.038)
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, share)])
    assert row.verdict == Verdict.NOT_SUPPORTED
    assert row.figure == "one: neumann − base: all 5 runs diverged"
    other = dataclasses.replace(share, better=share.worse, worse=share.better)
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, other)])
    assert row.verdict == Verdict.INCONCLUSIVE
    assert "nothing to compare: all runs of one side diverged" in row.figure
    spread = Spread(Source("one", "neumann"), 0.5)
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, spread)])
    assert row.verdict == Verdict.NOT_SUPPORTED


def test_the_p_value_belongs_to_the_figure(study, tmp_path):
    """Both tests support the claim; one of them excludes the claimed size."""
    study("neumann", [94.0, 94.1, 94.0, 94.1, 94.05])
    study("near", [93.90, 94.0, 93.88, 93.99, 93.95])
    study("far", [92.0, 93.6, 93.9, 92.5, 93.0])
    tests = [dataclasses.replace(AHEAD, worse=Source("one", name)) for name in ("near", "far")]
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, *tests)])
    assert row.verdict == Verdict.SMALLER
    decisive, smaller = row.figure.split("; smaller than claimed: ")
    assert decisive.startswith("one: neumann − far: +1.05")
    assert "p = 0.0" in decisive
    assert smaller.startswith("one: neumann − near: +0.1")


def test_a_borrowed_rate_at_the_edge_is_named(tmp_path, monkeypatch):
    (tmp_path / "one.toml").write_text(
        '[arms.whole]\n[arms.short]\nlr = "whole"\n[tuning]\nat = {epochs = 30}\n'
        "[test]\nseeds = 1\n"
    )
    monkeypatch.setattr(claim_tests, "STUDIES", tmp_path)
    ledger = Ledger(tmp_path / "one.jsonl", RunKey)
    for lr in (0.1, 0.2, 0.4):
        ledger.add(RunKey("search", "epochs=30", f"whole at {lr}", 0), {"lr": lr, "score": 90.0})
    for lr, edge in ((0.4, "short (epochs=15) at 0.4"), (0.2, None)):
        ledger.add(RunKey("final", "epochs=15", "short", 0), {"lr": lr, "score": 90.0})
        assert find_edge(Source("one", "short", "epochs=15"), Results(tmp_path)) == edge


def test_equality_of_two_kinds_of_arms_on_average(study, tmp_path):
    study("constant 1", [94.3, 94.31, 94.29, 94.3, 94.32])
    study("constant 2", [93.7, 93.72, 93.7, 93.69, 93.7])
    study("doubling", [94.0] * 5)
    one, two, base = (Source("one", arm) for arm in ("constant 1", "constant 2", "doubling"))
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, Equivalence((one, two), (base, base)))])
    assert row.verdict == Verdict.SUPPORTED
    assert "(means): +0.00 [" in row.figure
    assert "(90 % interval)" in row.figure
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, Equivalence((one,), (base,)))])
    assert row.verdict == Verdict.NOT_SUPPORTED


def test_results_beside_a_claim_have_no_part_in_its_verdict(study, tmp_path):
    study("neumann", [94.0, 94.2, 94.4, 94.1, 94.8])
    study("base", [93.0] * 5)
    behind = Contrast(Source("one", "base"), Source("one", "neumann"))
    waiting = Contrast(Source("one", "other"), Source("one", "neumann"))
    claim = dataclasses.replace(make_claim(1, AHEAD), beside=(behind, waiting))
    (alone,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    (row,) = judge_claims(Results(tmp_path), [claim])
    assert (row.verdict, row.figure) == (alone.verdict, alone.figure)
    assert row.beside == ("one: base − neumann: −1.30 [−1.69, −0.91] points, n = 5",)
    section = format_section(row)
    assert "- **Also measured**, not part of the verdict:\n    - one: base − neumann" in section
    assert "Also measured" not in format_section(alone)


def test_where_the_runs_come_from_is_said(study, tmp_path):
    origin = {"device": "NVIDIA H200", "torch": "2.11.0"}
    study("neumann", [94.0, 94.2, 94.4, 94.1, 94.8], **origin, commit="0123456789")
    study("base", [93.0] * 5, **origin, commit="abcdefabcd")
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert row.notes == ("trained on NVIDIA H200, torch 2.11.0, commits 01234567, abcdefab",)
    study("base", [93.0] * 5, **origin)
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, AHEAD)])
    assert row.notes == ("trained on NVIDIA H200, torch 2.11.0, commit 01234567",)


def test_losses_count_the_other_way(study, tmp_path):
    study("neumann", [1.50, 1.51, 1.52, 1.50, 1.51])
    study("base", [1.60, 1.62, 1.61, 1.60, 1.62])
    ahead = dataclasses.replace(AHEAD, quantity=get_loss, claimed=0.05)
    (row,) = judge_claims(Results(tmp_path), [make_claim(1, ahead)])
    assert row.verdict == Verdict.SUPPORTED
    assert "nats" in row.figure


def test_forces_along_runs(tmp_path):
    ledger = Ledger(tmp_path / "main-cifar10.jsonl", RunKey)
    results = Results(tmp_path)
    assert compare_forces(results) is None
    along = [[0.1, 3.0, 1.0, 100.0], [0.3, 2.0, 1.0, 100.0], [0.9, 0.1, 1.0, 50.0]]
    for seed in range(10):
        assert compare_forces(Results(tmp_path)) is None
        ledger.add(RunKey("final", "", "neumann", seed), {"score": 94.0, "forces": along})
    found = compare_forces(Results(tmp_path))
    assert found.verdict == Verdict.SUPPORTED
    assert "at most 3.0 % of the gradient" in found.figure
    late = [[share, 1.0, 0.5, 100.0] for share in (0.1, 0.5, 0.9)]
    ledger.add(RunKey("final", "", "neumann", 1), {"score": 94.0, "forces": late})
    assert compare_forces(Results(tmp_path)).verdict == Verdict.INCONCLUSIVE
    for seed in range(10):  # without a force at the end, the repulsion is not the larger one
        none = [*along[:2], [0.9, 0.0, 0.0, 50.0]]
        ledger.add(RunKey("final", "", "neumann", seed), {"score": 94.0, "forces": none})
    assert compare_forces(Results(tmp_path)).verdict == Verdict.NOT_SUPPORTED
    infinite = [*along, [0.5, None, 1.0, None], [0.6, 1.0, None, 50.0]]
    for seed in range(10):
        ledger.add(RunKey("final", "", "neumann", seed), {"score": 94.0, "forces": infinite})
    assert compare_forces(Results(tmp_path)).verdict == Verdict.SUPPORTED


def test_conjugate_gradients_by_the_clock(tmp_path):
    ledger = Ledger(tmp_path / "krylov.jsonl", RunKey)

    def record(arm, seconds, loss):
        run = {"seconds": seconds, "loss": loss} if loss else {"diverged": True}
        for seed in range(count_seeds("krylov")):
            ledger.add(RunKey("final", "", arm, seed), run)

    record("neumann", 10.0, 0.5)
    record("cg Hessian", 12.0, 1.2)
    assert race_conjugate_gradients(Results(tmp_path)) is None
    record("cg Gauss-Newton", 11.0, 0.6)
    found = race_conjugate_gradients(Results(tmp_path))
    assert found.verdict == Verdict.SUPPORTED
    assert "neumann: loss 0.500 after 10 s; cg Gauss-Newton: loss 0.600 after 11 s" in found.figure
    record("cg Gauss-Newton", 11.2, 0.4)  # a lower loss, but later
    assert race_conjugate_gradients(Results(tmp_path)).verdict == Verdict.INCONCLUSIVE
    record("cg Gauss-Newton", 10.9, 0.4)  # about the same time
    assert race_conjugate_gradients(Results(tmp_path)).verdict == Verdict.NOT_SUPPORTED
    record("cg Gauss-Newton", 11.0, None)
    assert race_conjugate_gradients(Results(tmp_path)).verdict == Verdict.SUPPORTED


@pytest.mark.parametrize(
    ("bend", "verdict"),
    [(1.0, Verdict.SUPPORTED), (4.0, Verdict.NOT_SUPPORTED), (-1.0, Verdict.NOT_SUPPORTED)],
)
def test_growth_along_runs_at_a_constant_rate(bend, verdict, tmp_path):
    """λmax rises by 3 an epoch, and by `bend` times that in the second half."""
    results = Results(tmp_path)
    assert judge_growth(results).verdict == Verdict.INCONCLUSIVE  # of the published run
    for seed in range(3):
        heights = [3 * min(e, 5) + 3 * (bend + 0.05 * seed) * max(e - 5, 0) for e in range(10)]
        points = [
            {"epoch": e, "batches": [{"enough": {"largest": {"value": 20 + height}}}]}
            for e, height in enumerate(heights)
        ]
        (tmp_path / f"growth-{seed}.json").write_text(json.dumps({"points": points}))
    assert judge_growth(results).verdict == verdict


@pytest.mark.parametrize(
    ("left", "verdict"),
    [
        ((0.1, 0.2, 0.45), Verdict.SUPPORTED),
        ((0.1, 0.2, 0.55), Verdict.INCONCLUSIVE),
        ((0.6, 0.9, 1.3), Verdict.NOT_SUPPORTED),
    ],
)
def test_the_smallest_eigenvalue_along_runs_at_a_constant_rate(left, verdict, tmp_path):
    """|λmin| rises during the first third, then falls on a line to a share of its height."""
    results = Results(tmp_path)
    assert follow_smallest(results).verdict == Verdict.INCONCLUSIVE  # of the published run
    for seed, share in enumerate(left):
        heights = [2.0, 4.0, 6.0, *(10 - 10 * (1 - share) * k / 5 for k in range(6))]
        points = [
            {"epoch": e, "batches": [{"enough": {"smallest": {"value": -height}}}]}
            for e, height in enumerate(heights)
        ]
        (tmp_path / f"growth-{seed}.json").write_text(json.dumps({"points": points}))
    found = follow_smallest(results)
    assert found.verdict == verdict
    assert f"goes to {left[0]:.2f} to {left[-1]:.2f} of what it was, 3 runs" in found.figure


def test_eigenvalues_of_a_new_network(tmp_path):
    def measure(*counts):
        measurements = [
            {
                "step": 0,
                "smallest": -18.0,
                "largest": 16.0,
                "parameters": 6_573_120,
                "beyond": [{"share": 0.1, "below": {"count": count}}],
            }
            for count in counts
        ]
        (tmp_path / "at-initialization.json").write_text(json.dumps({"measurements": measurements}))
        return count_negative(Results(tmp_path)).verdict

    assert count_negative(Results(tmp_path)) is None
    assert measure(12.0, 40.0) == Verdict.SUPPORTED
    assert measure(2.0, 40.0) == Verdict.INCONCLUSIVE
    assert measure(2.0, 3.0) == Verdict.NOT_SUPPORTED
