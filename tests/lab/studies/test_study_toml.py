"""A study's file says everything about its runs; what it cannot say is an error of one line."""

from pathlib import Path

import pytest

from neumann.lab.errors import UsageError
from neumann.lab.optimizers.arms import Arm
from neumann.lab.studies.settings import CompareConfig, SweepConfig
from neumann.lab.studies.study_toml import read_study_toml

STUDIES = Path(__file__).parents[3] / "studies"
FILES = sorted(STUDIES.glob("*/*.toml"))

WHOLE = """
title = "Two arms"
about = "A test."

[settings]
data = "digits"
epochs = 2
device = "cpu"

[arms.neumann]
opt = "neumann:warmup=10%"

[arms.plain]
opt = "neumann:warmup=10%,cubic=0"
lr = "neumann"

[arms."small batches"]
opt = "sgd"
lr = "0.1:0.4:3"
bn-batch = 32

[axes]
batch_size = [32, 64, 128]
"neumann:reset_growth" = [1, 2]

[tuning]
lr = "0.05:0.2:3"
epochs = 1
at = {batch_size = 64}
scale = "linear"

[test]
seeds = 4
"""


def read(text, tmp_path, *changes, **flags):
    file = tmp_path / "study.toml"
    file.write_text(text)
    return read_study_toml(file, Path("x"), changes, **flags)


def test_whole_file(tmp_path):
    study = read(WHOLE, tmp_path, jobs=3, seconds=9.0)
    assert (study.title, study.about, study.seconds) == ("Two arms", "A test.", 9.0)
    assert [point.folder.name for point in study.points] == [
        "batch_size=32,neumann_reset_growth=1",
        "batch_size=32,neumann_reset_growth=2",
        "batch_size=64,neumann_reset_growth=1",
        "batch_size=64,neumann_reset_growth=2",
        "batch_size=128,neumann_reset_growth=1",
        "batch_size=128,neumann_reset_growth=2",
    ]
    small, large = study.points[0], study.points[3]
    assert small.tuned_at == Path("x/batch_size=64,neumann_reset_growth=1")
    assert (small.factor, large.factor, large.tuned_at) == (0.5, 1.0, None)
    assert list(study.sweeps) == [study.points[2].folder, large.folder]
    config = large.config
    assert isinstance(config, SweepConfig)
    assert config.arms == (
        "neumann=neumann:warmup=10%,reset_growth=2",
        "plain=neumann:warmup=10%,cubic=0,lr=neumann,reset_growth=2",
        "small batches=sgd:lr=0.1:0.4:3@bn_batch=32",
    )
    assert (config.batch_size, config.epochs, config.search_epochs) == (64, 2, 1)
    assert (config.seeds, config.search_seeds, config.jobs, config.seconds) == (4, 1, 3, 9.0)


def test_without_axes_and_tuning_it_is_a_comparison(tmp_path):
    study = read('[settings]\nlr = 0.1\n[arms.sgd]\n[arms.base]\nopt = "sgd"\nlr = 0.2', tmp_path)
    (point,) = study.points
    assert point.folder == Path("x")
    assert isinstance(point.config, CompareConfig)
    assert point.config.arms == ("sgd=sgd", "base=sgd:lr=0.2")
    assert (point.config.lr, point.config.seeds) == (0.1, 3)


def test_learning_rates_per_batch_size(tmp_path):
    text = """
[settings]
batch_size = 512
[arms.sgd]
lr = "0.1/256"
[arms.small]
opt = "sgd"
lr = "0.1/256"
batch_size = 64
"""
    (point,) = read(text, tmp_path).points
    assert point.config.arms == ("sgd=sgd:lr=0.2", "small=sgd:lr=0.025@batch_size=64")
    with pytest.raises(UsageError, match=r"must be RATE/BATCH_SIZE, as in 0\.1/256"):
        read(text.replace("/256", "/many"), tmp_path)


def test_changes_replace_what_the_file_says_of_a_setting(tmp_path):
    changes = ("batch-size=16", "bn_batch=8", "data-dir=d")
    study = read(WHOLE, tmp_path, *changes)
    assert len(study.points) == 2
    config = study.points[0].config
    assert (config.batch_size, config.bn_batch, config.data_dir) == (16, 8, Path("d"))
    assert config.arms[2] == "small batches=sgd:lr=0.1:0.4:3"


def test_a_shorter_study_has_a_shorter_search(tmp_path):
    text = WHOLE.replace("epochs = 2", "epochs = 60").replace("epochs = 1", "epochs = 20")
    for change, expected in (("epochs=1", 1), ("epochs=30", 20)):
        assert read(text, tmp_path, change).points[0].config.search_epochs == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title =", "titel =", "unknown key 'titel'; did you mean title"),
        (
            "[arms.plain]",
            "[arms.plain]\nepoch = 3",
            r"setting in \[arms.plain\] 'epoch'; did .* ep",
        ),
        ("epochs = 2", "epoch = 2", r"unknown setting in \[settings\] 'epoch'; did you mean epo"),
        ("epochs = 2", 'epochs = "2"', r"\[settings\]: epochs should be a whole number"),
        ("epochs = 1", "epoch = 1", r"unknown key of \[tuning\] 'epoch'; did you mean epochs"),
        ("seeds = 4", 'seeds = "4"', r"\[test\]: seeds should be a whole number"),
        ('opt = "sgd"', 'opt = "sgdd"', "unknown optimizer 'sgdd'"),
        ('opt = "sgd"', "opt = 3", r"\[arms.small batches\]: opt must be text"),
        ('lr = "neumann"', 'lr = "a, b"', "lr cannot name an arm with a comma"),
        ("bn-batch = 32", "batch_size = 32", "batch_size is an axis; remove it from the arm"),
        ("bn-batch = 32", "data = 'x'", r"unknown setting in \[arms.small batches\] 'data'"),
        ("batch_size = [", "bach_size = [", r"unknown setting in \[axes\] 'bach_size'"),
        ("32, 64, 128]", "64, 64]", "batch_size has 64 twice"),
        ("32, 64, 128]", "]", "batch_size has no values"),
        ("32, 64, 128]", '64, "x"]', r"\[axes\]: batch_size should be a whole number"),
        (
            '"neumann:reset_growth"',
            '"neumann:reset_grow"',
            "unknown neumann option 'reset_grow'; did you",
        ),
        (
            'lr = "neumann"',
            'lr = "neuman"',
            r"arm as lr of \[arms.plain\] 'neuman'; did you mean n",
        ),
        (
            "[32, 64, 128]",
            "512",
            r"\[axes\]: batch_size must be a list, as in batch_size = \[512\]",
        ),
        (
            '"neumann:reset_growth" = [1, 2]',
            '"adamw:eps" = [1e-8, 1e-6]',
            r"unknown optimizer in \[axes\] 'adamw'; choose from: neumann, sgd",
        ),
        (
            '[axes]\nbatch_size = [32, 64, 128]\n"neumann:reset_growth" = [1, 2]\n',
            "",
            r"\[tuning\]: at batch_size = 64 needs batch_size in \[axes\]",
        ),
        ("at = {batch_size = 64}", "at = {batch_size = 65}", "65 is not one of"),
        ("at = {batch_size = 64}", "at = {epochs = 64}", r"unknown axis in \[tuning\] at"),
        ('scale = "linear"', 'scale = "cubic"', "scale should be 'none' or 'linear' or 'sqrt'"),
        ("[arms.plain]", '[arms."a=b"]', "a name cannot have"),
        ("[arms.neumann]", "[arms.neumann", "is not TOML"),
    ],
)
def test_errors_name_the_file_and_the_nearest_name(old, new, message, tmp_path):
    assert old in WHOLE
    with pytest.raises(UsageError, match=message) as caught:
        read(WHOLE.replace(old, new), tmp_path)
    assert str(tmp_path / "study.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("epoch=1", "unknown setting in --set 'epoch'; did you mean epochs"),
        ("epochs", "--set must be SETTING=VALUE"),
        ("epochs=many", "epochs should be a whole number"),
        ("lr=0.1", "unknown setting in --set 'lr'"),
    ],
)
def test_unusable_changes(change, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        read(WHOLE, tmp_path, change)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        read_study_toml(tmp_path / "none.toml", tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(STUDIES).as_posix())
def test_published_studies_can_be_planned(file, tmp_path):
    """Every run of every study of this repository has settings that work together."""
    study = read_study_toml(file, tmp_path, ("device=cpu",))
    runs = study.list_runs()
    assert study.title
    assert len(runs) > 1
    for run in runs:
        Arm.parse(run.config.opt).check()
    assert not any(tmp_path.iterdir())


def test_there_are_published_studies():
    assert len(FILES) > 10
