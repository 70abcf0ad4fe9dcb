"""From the folders of studies to lines of results/paper."""

import json
from pathlib import Path

import pytest

from benchmarks.common.ledger import Ledger
from benchmarks.paper.claim_tests import (
    Source,
)
from benchmarks.paper.collect_runs import add_runs, check_settings, check_steps, check_study
from benchmarks.paper.run_lines import (
    Results,
    RunKey,
    collect_study,
    describe_run,
    name_point,
)
from benchmarks.paper.verdict_table import (
    find_edge,
)
from neumann.lab.errors import UsageError
from neumann.lab.storage.run_files import RunFiles
from neumann.lab.studies.comparison import Session
from neumann.lab.studies.study_toml import read_study_toml

ROOT = Path(__file__).parents[2]
STUDY = """
title = "Batches"
[settings]
data = "digits"
epochs = 2
device = "cpu"
log_every = 5
[arms.neumann]
opt = "neumann:warmup=10%"
[arms.base]
opt = "sgd"
[axes]
batch_size = [128, 256]
[tuning]
lr = "0.1:0.4:3"
at = {batch_size = 128}
[test]
seeds = 2
"""


@pytest.mark.slow
def test_an_arm_that_diverges_at_every_searched_rate_has_diverged_runs(tmp_path):
    """Divergence is evidence; without these lines the claim would wait for runs for ever."""
    file = tmp_path / "lost.toml"
    file.write_text(STUDY.replace('opt = "sgd"', 'opt = "sgd"\nlr = "1e20:1e30:3"'))
    study = read_study_toml(file, tmp_path / "lost")
    study.write()
    study.test(study.search(Session()), Session())
    runs = collect_study(study.folder)
    lost = {key for key, run in runs.items() if run == {"diverged": True}}
    points = [name_point(batch_size=batch) for batch in (128, 256)]  # the second takes the rates
    assert lost == {RunKey("final", p, "base", seed) for p in points for seed in range(2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    file = tmp_path_factory.mktemp("study") / "batches.toml"
    file.write_text(STUDY)
    study = read_study_toml(file, file.parent / "batches")
    study.write()
    study.test(study.search(Session()), Session())
    return study.folder


@pytest.mark.slow
def test_runs_of_a_study_are_collected_once(folder, tmp_path):
    found = collect_study(folder)
    stages = [key.stage for key in found]
    assert (stages.count("search"), stages.count("final")) == (6, 8)
    results = Results(tmp_path / "new")
    assert add_runs(results.open("batches"), found) == 14
    again = Results(tmp_path / "new")
    assert add_runs(again.open("batches"), found) == 0
    assert again.open("batches").path.stat().st_size < 20_000
    for point in (name_point(batch_size=128), name_point(batch_size=256)):
        runs = again.find("batches", "neumann", point)
        for seed, run in runs.items():
            place = folder / point / ("final" if point.endswith("128") else "")
            summary = json.loads((place / f"neumann/seed-{seed}/summary.json").read_text())
            assert run["score"] == summary["accuracy"]
            assert run["curve"][-1] == pytest.approx(summary["accuracy"], rel=1e-3)
            assert len(run["curve"]) == len(run["train_loss_curve"]) == 2
            assert "recalibrated_curve" not in run  # a network without BatchNorm
            assert all(0 < share <= 1 for share, *_ in run["forces"])
        assert sorted(runs) == [0, 1]
    assert "forces" not in again.find("batches", "base", name_point(batch_size=128))[0]
    assert find_edge(Source("batches", "neumann", "batch_size=128"), again) in (
        None,
        "neumann (batch_size=128) at 0.1",
        "neumann (batch_size=128) at 0.4",
    )


def test_folders_of_a_machine_are_not_kept():
    for data, kept in (
        ("text:/home/me/a.txt,b/c.txt.xz", "text:a.txt,c.txt.xz"),
        ("cifar10", "cifar10"),
        ("folder:/data/imagenet", "folder:imagenet"),
    ):
        files = RunFiles({"data": data}, {}, [], {"diverged": {"step": 1, "lr": 1.0}})
        files.summary["diverged"]["checkpoint"] = None
        assert describe_run(files, curves=True) == {"data": kept, "diverged": True}


@pytest.mark.slow
def test_a_result_is_not_replaced(folder, tmp_path):
    found = collect_study(folder)
    ledger = Ledger(tmp_path / "batches.jsonl", RunKey)
    add_runs(ledger, found)
    key = next(iter(found))
    changed = {**found, key: {**found[key], "score": 12.5}}
    with pytest.raises(UsageError, match=r"has score .* but the folder has 12\.5"):
        add_runs(ledger, changed)


@pytest.mark.slow
def test_runs_with_other_settings_are_refused(folder, tmp_path):
    file = folder.parent / "batches.toml"
    check_settings(file, folder)
    longer = tmp_path / "batches.toml"
    longer.write_text(STUDY.replace("epochs = 2", "epochs = 3"))
    with pytest.raises(UsageError, match=r"has epochs 2, and batches.toml has 3"):
        check_settings(longer, folder)
    longer.write_text(STUDY.replace("epochs = 2", 'epochs = 2\ncompile = "on"'))
    with pytest.raises(UsageError, match=r"has compile off, and batches.toml has on"):
        check_settings(longer, folder)  # a setting that the file leaves open may differ


@pytest.mark.slow
def test_runs_on_other_data_are_refused(folder):
    found = collect_study(folder)
    check_steps(folder, found)
    key = next(key for key in found if key.stage == "final")
    other = {**found, key: {**found[key], "steps": found[key]["steps"] + 3}}
    with pytest.raises(UsageError, match="so they had different data"):
        check_steps(folder, other)


def test_runs_of_another_study_are_refused(tmp_path):
    folder = tmp_path / "main-cifar10"
    key = RunKey("final", "", "neumann", 0)
    with pytest.raises(UsageError, match="is not a study's folder"):
        check_study(folder, {})
    folder.mkdir()
    check_study(folder, {key: {"data": "cifar10", "model": "resnet9"}})
    with pytest.raises(UsageError, match=r"seed 0 has data digits, and main-cifar10.toml has cif"):
        check_study(folder, {key: {"data": "digits", "model": "mlp"}})
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=r"there is no other.toml in studies/paper"):
        check_study(tmp_path / "other", {})
