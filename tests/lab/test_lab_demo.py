"""The demo: five arms, at learning rates that the sweep it names would try."""

import dataclasses

import pytest
import torch

from neumann.cli import main
from neumann.lab.demo import ARMS, DemoConfig
from neumann.lab.optimizers import Arm
from neumann.lab.studies import CompareConfig, SweepConfig
from neumann.lab.sweep import sweep_grid


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_what_is_compared():
    config = DemoConfig().comparison()
    config.check()
    names = [Arm.parse(arm).name for arm in config.arms]
    assert names == ["neumann", "sgd", "rmsprop", "adam", "adamw"]
    assert (config.data, config.seeds, config.held_out) == ("digits", 3, False)


def test_every_learning_rate_is_inside_the_grid_it_was_chosen_from():
    arms = [Arm.parse(text) for text in ARMS]
    grid = sweep_grid(SweepConfig(arms=tuple(arm.name for arm in arms)))
    for arm in arms:
        assert arm.lr() in grid[arm.name][1:-1]


def test_a_new_folder_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(DemoConfig().folder()) == "runs/demo-1"
    DemoConfig().folder().mkdir(parents=True)
    assert str(DemoConfig().folder()) == "runs/demo-2"
    assert DemoConfig(output=tmp_path / "x").folder() == tmp_path / "x"


@pytest.mark.usefixtures("threads")
def test_the_command(tmp_path, capsys, monkeypatch):
    def short(self):
        return dataclasses.replace(whole(self), epochs=1)

    whole = DemoConfig.comparison
    monkeypatch.setattr(DemoConfig, "comparison", short)
    monkeypatch.setattr("neumann.report.write_report", lambda folder: folder / "report.html")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seeds", "1", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    for arm in ARMS:
        assert f"\n{arm} " in printed
    assert "records: runs/demo-1\n" in printed
    assert "report: runs/demo-1/" in printed
    assert isinstance(whole(DemoConfig()), CompareConfig)
