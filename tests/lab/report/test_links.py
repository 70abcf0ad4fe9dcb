"""Links inside a folder from someone else: no command writes through them."""

import os
import shutil

import pytest

from neumann.lab.commands.main import main
from tests.support.fake_records import fake_comparison, fake_run, fake_sweep
from tests.support.programs import run


@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def refused(words, link, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{link} is a link to " in error
    return True


def test_report_does_not_write_through_plots(tmp_path, elsewhere, capsys):
    run = fake_run(tmp_path / "run")
    (run / "plots").symlink_to(elsewhere)
    assert refused(["report", str(run)], run / "plots", capsys)
    assert os.listdir(elsewhere) == []
    assert not (run / "report.html").exists()


def test_report_does_not_replace_a_link(tmp_path, elsewhere, capsys):
    run = fake_run(tmp_path / "run")
    (run / "report.html").symlink_to(elsewhere / "page.html")
    assert refused(["report", str(run)], run / "report.html", capsys)
    assert (run / "report.html").is_symlink()
    assert os.listdir(elsewhere) == []
    assert not (run / "plots").exists()


def replace_by_link(folder, elsewhere):
    shutil.move(folder, elsewhere / "moved")
    folder.symlink_to(elsewhere / "moved")


def test_report_does_not_follow_a_link_to_a_run(tmp_path, elsewhere, capsys):
    study = fake_comparison(tmp_path / "c", {"sgd": {}, "adam": {}}, 2)
    replace_by_link(study / "adam" / "seed-1", elsewhere)
    assert refused(["report", str(study)], study / "adam" / "seed-1", capsys)


def test_report_does_not_follow_a_link_to_an_arm_or_a_search(tmp_path, elsewhere, capsys):
    study = fake_sweep(tmp_path / "s", {"sgd": [0.1, 0.2]}, {"sgd": 0.2}, seeds=1)
    replace_by_link(study / "final" / "sgd_lr=0.2", elsewhere)
    assert refused(["report", str(study)], study / "final" / "sgd_lr=0.2", capsys)
    shutil.rmtree(study / "final")
    shutil.rmtree(elsewhere / "moved")
    replace_by_link(study / "search", elsewhere)
    assert refused(["report", str(study)], study / "search", capsys)


SMALL = ["--data", "synthetic:4,2,32", "--batch-size", "16", "--epochs", "2", "--opt", "sgd"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "tensorboard"])
def test_a_resumed_run_does_not_write_through_a_link(tmp_path, elsewhere, name, capsys):
    words = ["train", *SMALL, "--output", str(tmp_path / "run"), "--resume", "auto"]
    assert main(words) == 0
    capsys.readouterr()
    (tmp_path / "run" / "summary.json").unlink()
    path = tmp_path / "run" / name
    if not path.exists():
        path.mkdir()
    replace_by_link(path, elsewhere)
    assert refused(words, path, capsys)


def test_the_folder_itself_may_be_a_link(tmp_path, elsewhere):
    """The user has named it."""
    (tmp_path / "run").symlink_to(elsewhere)
    assert main(["train", *SMALL, "--output", str(tmp_path / "run")]) == 0
    assert (elsewhere / "summary.json").exists()


@pytest.mark.slow
def test_settings_for_plots_in_the_working_folder_are_ignored(tmp_path):
    """matplotlib would read them first, and they can name programs to run."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nlines.linewidth: 77\n")
    fake_run(tmp_path / "run", epochs=1)
    code = (
        "import sys; assert 'matplotlib' not in sys.modules;"
        "from neumann.lab.report import write_report; write_report('run');"
        "import matplotlib; print(matplotlib.rcParams['lines.linewidth'])"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) != 77
