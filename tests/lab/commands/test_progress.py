"""The bar of a study moves inside runs and keeps its width."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from neumann.lab.commands import progress
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
