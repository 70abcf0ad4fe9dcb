"""The demo compares five arms at learning rates from the sweep that its docstring names."""

import dataclasses

import pytest
import torch

from neumann.lab.commands.demo import ARMS, DemoConfig
from neumann.lab.commands.main import main
from neumann.lab.optimizers.arms import Arm
from neumann.lab.studies.lr_sweep import make_grid
from neumann.lab.studies.settings import CompareConfig, SweepConfig


@pytest.fixture
def threads():
    """Restore the number of threads, which the demo sets to 1."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_settings_of_the_comparison():
    config = DemoConfig().make_comparison()
    config.check()
    names = [Arm.parse(arm).name for arm in config.arms]
    assert names == ["neumann", "sgd", "rmsprop", "adam", "adamw"]
    assert (config.data, config.seeds, config.held_out) == ("digits", 3, False)


def test_every_learning_rate_is_bracketed_by_its_grid():
    arms = [Arm.parse(text) for text in ARMS]
    grid = make_grid(SweepConfig(arms=tuple(arm.name for arm in arms)))
    for arm in arms:
        assert arm.lr() in grid[arm.name][1:-1]


def test_default_folder_is_new_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(DemoConfig().choose_folder()) == "runs/demo-1"
    DemoConfig().choose_folder().mkdir(parents=True)
    assert str(DemoConfig().choose_folder()) == "runs/demo-2"
    assert DemoConfig(output=tmp_path / "x").choose_folder() == tmp_path / "x"


@pytest.mark.usefixtures("threads", "no_report")
def test_demo_prints_all_arms(tmp_path, capsys, monkeypatch):
    def short(self):
        return dataclasses.replace(whole(self), epochs=1)

    whole = DemoConfig.make_comparison
    monkeypatch.setattr(DemoConfig, "make_comparison", short)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seeds", "1", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    for arm in ARMS:
        assert f"\n{arm} " in printed
    assert "records: runs/demo-1\n" in printed
    assert "report: runs/demo-1/" in printed
    assert isinstance(whole(DemoConfig()), CompareConfig)
