"""A data set, a model or an optimizer is added in one place: a line in its table."""

from torch import nn

from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.data.load import DATASETS
from neumann.lab.models.build import FORMS, MODELS, Entry
from neumann.lab.optimizers.arm_recipes import RECIPES, Recipe
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process


def test_help_names_everything_in_the_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["train", "--help"]) == 0
    page = capsys.readouterr().out
    for flag, names in (("data", DATASETS), ("model", [*MODELS, *FORMS]), ("opt", RECIPES)):
        (line,) = [line for line in page.splitlines() if line.startswith(f"  --{flag} ")]
        assert ", ".join(names) in line


def test_one_line_in_each_table_is_enough(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(DATASETS, "numbers", DATASETS["digits"])
    linear = Entry(lambda shape, classes: nn.Linear(*shape, classes), ("vector",))
    monkeypatch.setitem(MODELS, "linear", linear)
    monkeypatch.setitem(RECIPES, "adagrad", Recipe("torch.optim", "Adagrad", 0.05))
    config = TrainConfig(data="numbers", model="linear", opt="adagrad", epochs=1, device="cpu")
    assert Training(config.resolve(), Process()).run(tmp_path).accuracy > 50
    assert main(["train", "--opt", "help"]) == 0
    assert "\nadagrad " in capsys.readouterr().out
