"""What a folder holds, and the verdict that its page starts with."""

import json
import shutil

import pytest

from neumann.lab.errors import UsageError
from neumann.lab.report.study_records import Sensitivity, Trial, read_study
from neumann.lab.report.verdicts import state_verdict
from neumann.lab.storage.reading import RecordsError
from tests.support.fake_records import fake_comparison, fake_run, fake_sweep

RATES = [0.1, 0.2, 0.4, 0.8]


def judge(folder):
    return state_verdict(read_study(folder))


def test_other_folders_are_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="holds nothing to report") as caught:
        read_study(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="holds nothing to report"):
        read_study(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sweep.json", {"format": 2, "grid": {}, "winners": None}, "this version can read"),
        ("sweep.json", {"format": 1, "grid": [], "winners": None}, "grid should be a JSON object"),
        ("comparison.json", {"seeds": 3}, "arms is missing"),
        ("comparison.json", {"arms": [], "seeds": 3, "target": None}, "0 arms with seeds = 3"),
        ("config.json", {"format": 99}, "this version can read"),
    ],
)
def test_files_of_other_versions_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises((UsageError, RecordsError), match=f"{name} is .*{message}"):
        read_study(tmp_path)


def test_verdict_of_a_run(tmp_path):
    found = judge(fake_run(tmp_path / "a", target=90.0))
    assert found.findings[0].startswith("96.85 % accuracy")
    assert "after 120 steps" in found.findings[0]
    assert found.findings[1] == "90 % was reached after 40 steps (2.0 epochs)."
    assert judge(fake_run(tmp_path / "b", target=99.9)).findings[1] == "99.9 % was never reached."


def test_verdict_of_a_run_that_did_not_end_well(tmp_path):
    assert judge(fake_run(tmp_path / "a", ended=2)).warnings == (
        "Unfinished: 2 of 6 epochs are done; 40 steps are recorded.",
    )
    (warning,) = judge(fake_run(tmp_path / "b", "sgd:lr=9", diverged=50)).warnings
    assert warning.startswith("Diverged: the loss was not finite in step 50 at lr 9.")
    summary = tmp_path / "b" / "summary.json"
    content = json.loads(summary.read_text())
    content["diverged"]["checkpoint"] = str(tmp_path / "b" / "checkpoints" / "step-00000040")
    summary.write_text(json.dumps(content))
    (warning,) = judge(tmp_path / "b").warnings
    assert warning.endswith(" The last good checkpoint is checkpoints/step-00000040.")


def test_verdict_of_a_comparison(tmp_path):
    folder = fake_comparison(
        tmp_path, {"neumann": {}, "sgd": {"best": 90.0}, "adam": {"diverged": 30}}
    )
    found = judge(folder)
    assert found.findings[0].startswith("neumann is ahead of sgd by 7.")
    assert found.findings[1] == "adam diverged in 3 of 3 runs; no seed is left to compare."
    assert found.warnings == (f"neumann: {LONG_WARMUP}",)


LONG_WARMUP = "100 of 120 steps were its SGD warm-up; lower warmup_epochs."
WARMUP_ONLY = "all 60 steps were its SGD warm-up; the Neumann iteration never began."


def test_a_warm_up_as_long_as_the_training_is_pointed_out(tmp_path):
    arms = {"neumann:lr=0.1": {}, "neumann:warmup_epochs=1": {}, "sgd": {}}
    found = judge(fake_comparison(tmp_path / "a", arms, epochs=3))
    assert found.warnings == (f"neumann (lr 0.1): {WARMUP_ONLY}",)
    assert judge(fake_run(tmp_path / "b", "neumann", epochs=3)).warnings == (
        f"neumann: {WARMUP_ONLY}",
    )
    assert judge(fake_run(tmp_path / "c", "neumann", epochs=6)).warnings == (
        f"neumann: {LONG_WARMUP}",
    )
    assert judge(fake_run(tmp_path / "d", "neumann", epochs=10)).warnings == ()


def test_runs_that_are_not_shown_are_counted(tmp_path):
    folder = fake_comparison(tmp_path, {"sgd": {}, "adam": {"ended": 2}})
    fake_comparison(folder, {"adamw": {}}, 1)
    assert judge(folder).warnings == (f"3 finished runs in {tmp_path.name} are not shown.",)


def test_runs_of_a_sweep_that_are_not_shown_are_counted(tmp_path):
    folder = fake_sweep(tmp_path, {"sgd": [0.1, 0.4, 0.8]}, {"sgd": 0.4})
    fake_run(folder / "final" / "adamw" / "seed-0")
    assert judge(folder).warnings == (f"1 finished run in {folder.name}/final is not shown.",)


def test_missing_runs_are_counted_first(tmp_path):
    folder = fake_comparison(tmp_path, {"neumann": {}, "sgd": {"only": 1}, "adam": {"ended": 2}})
    assert judge(folder).warnings[0].startswith("Unfinished: 5 of 9 runs have not finished.")


def test_a_comparison_without_any_run(tmp_path):
    found = judge(fake_comparison(tmp_path, {"neumann": {"only": 0}, "sgd": {"only": 0}}))
    assert found.findings == ()
    assert "6 of 6" in found.warnings[0]


def test_one_arm_alone(tmp_path):
    found = judge(fake_comparison(tmp_path, {"sgd": {"diverged_seeds": (1,)}}))
    assert found.findings[0].startswith("sgd reaches 96.94")
    assert found.findings[0].endswith("(n = 2); 1 run diverged.")


def test_a_sweep(tmp_path):
    arms = {"neumann": RATES, "adamw:lr=0.001:0.004:2": [0.001, 0.004]}
    folder = fake_sweep(tmp_path, arms, {"neumann": 0.4, "adamw:lr=0.001:0.004:2": 0.004})
    study = read_study(folder)
    assert [arm.name for arm in study.arms] == ["neumann", "adamw"]
    assert [(each.arm, each.index, each.chosen) for each in study.sensitivities] == [
        ("neumann", 0, 0.4),
        ("adamw", 1, 0.004),
    ]
    found = state_verdict(study)
    assert found.findings[0].endswith("0.4 for neumann and 0.004 for adamw.")
    assert found.findings[1].startswith("neumann is ahead of adamw")
    assert found.warnings == (
        "neumann: all 40 steps were its SGD warm-up; the Neumann iteration never began in the "
        "search.",
        "The best learning rate of adamw, 0.004, is the highest tried: it is not bracketed, and a "
        "higher one may be better.",
        f"neumann: {LONG_WARMUP}",
    )


def test_a_sweep_says_whose_learning_rate_an_arm_takes(tmp_path):
    takers = [f"neumann-spectral:momentum={beta},lr=neumann-spectral" for beta in (0.7, 0.8)]
    names = [f"neumann-spectral (momentum {beta})" for beta in (0.7, 0.8)]
    grid = {"neumann-spectral": RATES, "muon": RATES, takers[0]: []}
    winners = {"neumann-spectral": 0.4, "muon": 0.2, takers[0]: 0.4}
    chosen = "Learning rates chosen on held-out data: 0.4 for neumann-spectral and 0.2 for muon; "
    found = judge(fake_sweep(tmp_path / "a", grid, winners))
    assert found.findings[0] == f"{chosen}{names[0]} takes the rate of neumann-spectral."
    both = fake_sweep(tmp_path / "b", {**grid, takers[1]: []}, {**winners, takers[1]: 0.4})
    taken = f"{names[0]} and {names[1]} take the rate of neumann-spectral."
    assert judge(both).findings[0] == f"{chosen}{taken}"


def test_unfinished_sweeps(tmp_path):
    searching = fake_sweep(tmp_path / "a", {"sgd": RATES}, None)
    assert "no learning rate is chosen yet" in judge(searching).warnings[0]
    (searching / "search" / "sgd_lr=0.1" / "seed-0" / "summary.json").unlink()
    assert judge(searching).warnings[0].startswith("Unfinished: 1 of 8 runs of the search")
    shutil.rmtree(searching / "search")
    assert "8 of 8" in judge(searching).warnings[0]
    chosen = fake_sweep(tmp_path / "b", {"sgd": RATES}, {"sgd": 0.4}, final=False)
    assert "3 of 3 runs of the chosen learning rates" in judge(chosen).warnings[0]
    assert read_study(chosen).arms == ()


@pytest.mark.parametrize("part", ["search", "final"])
def test_a_sweep_that_lost_a_part_of_its_records(part, tmp_path):
    folder = fake_sweep(tmp_path, {"sgd": RATES}, {"sgd": 0.4})
    missing = folder / part / "comparison.json"
    missing.unlink()
    with pytest.raises(RecordsError, match="is missing, and its folder has runs") as caught:
        read_study(folder)
    assert str(missing) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sweep_in_which_everything_diverged(tmp_path):
    folder = fake_sweep(tmp_path, {"sgd": RATES}, {}, final=False, wild=0.0)
    assert judge(folder).warnings == ("sgd diverged at every learning rate tried.",)


def test_arms_that_differ_in_lr_alone_are_one_curve(tmp_path):
    arms = ["sgd:lr=0.4", "sgd:lr=0.1", "neumann", "neumann:momentum=0.8,lr=1", "sgd", "<b>"]
    folder = fake_comparison(tmp_path, {arm: {} for arm in arms}, 2)
    (found,) = read_study(folder).sensitivities
    assert found.arm == "sgd"
    assert [trial.lr for trial in found.trials] == [0.1, 0.2, 0.4]
    assert all(len(trial.scores) == 2 for trial in found.trials)


def test_the_best_lr_has_no_divergence():
    trials = tuple(
        Trial(lr, (accuracy,), diverged, 0)
        for lr, accuracy, diverged in ((0.1, 90.0, 0), (0.2, 91.0, 0), (0.4, 99.0, 1))
    )
    found = Sensitivity("sgd", 0, trials)
    assert found.best is trials[1]
    assert found.warning() is None
