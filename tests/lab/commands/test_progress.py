"""The bar of a study moves inside runs and keeps its width."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from neumann.lab.commands import progress
from neumann.lab.commands.report import print_report
from neumann.lab.config import TrainConfig
from neumann.lab.metrics import ACCURACY
from neumann.lab.studies.results import FinishedRun

LINE = {"kind": "epoch", "epoch": 10.0, "step": 20, "train_loss": 0.5}


@pytest.fixture(params=[80, 120])
def bar(request):
    console = Console(file=io.StringIO(), width=request.param, force_terminal=True)
    with progress._open_bar(console, "{task.description}") as shown:
        study = progress._StudyBar(shown, "")
        study.on_plan({("a", 0): TrainConfig(epochs=20), ("bc", 0): TrainConfig(epochs=20)})
        study.on_start(0, 2)
        yield study, shown.tasks[0]


def test_it_says_that_it_starts(bar):
    _, task = bar
    assert (task.description, task.total, task.completed) == ("starting", 2, 0)


def test_it_moves_inside_a_run(bar):
    study, task = bar
    study.on_line("a", 0, LINE)
    assert task.completed == 0.5
    study.on_line("bc", 0, LINE)
    assert task.completed == 1.0
    study.on_finish("a", 0, FinishedRun(Path(), ACCURACY, 91.0, None, None, None))
    assert task.completed == 1.5


def test_it_says_what_is_done_after_the_last_run(bar):
    study, task = bar
    for arm in ("a", "bc"):
        study.on_finish(arm, 0, FinishedRun(Path(), ACCURACY, 91.0, None, None, None))
    assert task.description.rstrip() == "reading the results"


def test_it_says_so_too_if_all_runs_have_finished_before(bar):
    study, task = bar
    study.on_start(2, 2)
    assert task.description == "reading the results"


ARMS = ("adamw:weight_decay=0.01,betas=(0.9, 0.95),lr=0.02", "adamw:lr=0.02", "base at 0.1")


def test_arms_have_short_names(bar, capsys):
    study, task = bar
    log = progress.StudyLog("search ")
    names = ["adamw (weight decay 0.01)", "adamw", "base at 0.1"]
    for observer in (study, log):
        observer.on_plan({(arm, 0): TrainConfig(epochs=20) for arm in ARMS})
        observer.on_start(0, 4)
    for arm, name in zip(ARMS, names, strict=True):
        study.on_line(arm, 0, LINE)
        assert task.description.startswith(f"{name} seed 0 epoch")
        for observer in (study, log):
            observer.on_finish(arm, 0, FinishedRun(Path(), ACCURACY, 91.0, None, None, None))
        assert task.description.rstrip() == f"{name} seed 0 91.00 %"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"search {k + 1}/4  {name}  seed 0  91.00 %" for k, name in enumerate(names)]


def test_work_that_takes_seconds_is_named_in_a_terminal(terminal, capsys, monkeypatch):
    with progress.show_activity("drawing the report"):
        pass
    assert capsys.readouterr().err == ""
    terminal(80)
    monkeypatch.setenv("TERM", "xterm")  # a spinner needs more than a dumb terminal
    with progress.show_activity("drawing the report"):
        pass
    assert "drawing the report" in capsys.readouterr().err


def test_a_report_says_that_it_is_drawn(tmp_path, terminal, capsys, monkeypatch):
    monkeypatch.setattr("neumann.lab.report.write_report", lambda folder: folder / "report.html")
    terminal(80)
    monkeypatch.setenv("TERM", "xterm")
    print_report(tmp_path)
    printed = capsys.readouterr()
    assert "drawing the report" in printed.err
    assert f"report: {tmp_path}" in printed.out


def test_the_text_never_gets_shorter(bar):
    """A text of another width would change that of the bar, which would jump."""
    study, task = bar
    study.on_line("bc", 0, LINE)
    width = len(task.description)
    study.on_finish("a", 0, FinishedRun(Path(), ACCURACY, 91.0, None, None, None))
    assert task.description.rstrip() == "a seed 0 91.00 %"
    assert len(task.description) == width


def test_the_text_of_a_narrow_terminal_leaves_room_for_the_bar(bar):
    study, task = bar
    narrow = study._bar.console.width == 80
    study.on_line("a", 0, LINE)
    place = "epoch 10.0/20" if narrow else "epoch 10.0/20 loss 0.500"
    assert task.description == f"a seed 0 {place}"
    study.on_line("a", 0, {**LINE, "accuracy": 91.0})
    assert task.description.rstrip() == ("a seed 0" if narrow else f"a seed 0 {place}") + " 91.00 %"
