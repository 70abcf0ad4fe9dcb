"""`--opt help` lists the optimizers, a line each; so does an unknown name that is like none."""

import pytest

from neumann.lab.commands.main import main
from neumann.lab.optimizers.arm_recipes import RECIPES


def test_every_optimizer_has_a_summary():
    assert all(recipe.about for recipe in RECIPES.values())


@pytest.mark.parametrize(
    "words",
    [["train", "--opt", "help"], ["compare", "--arms", "sgd", "help"], ["sweep", "--arms", "help"]],
)
def test_help_lists_the_optimizers(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(RECIPES) + 1]] == list(RECIPES)
    assert lines[1].startswith("neumann-spectral ")
    assert max(map(len, lines)) <= 80
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--opt", "xyz"], "--opt: unknown optimizer 'xyz'; choose one of these"),
        (["sweep", "--arms", "sgd", "a=xyz:lr=1@epochs=2"], "--arms: unknown optimizer 'xyz'"),
    ],
)
def test_an_error_that_lists_them(words, message, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "\nadamw " in printed.out
    assert printed.err.startswith(f"neumann: {message}")
    assert printed.err.count("\n") == 1


def test_a_near_name_is_suggested_instead(capsys):
    assert main(["train", "--opt", "sgdd"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "neumann: unknown optimizer 'sgdd'; did you mean sgd?\n"


def test_says_which_extra_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("neumann.lab.commands.arm_list.find_spec", lambda name: None)
    assert main(["train", "--opt", "help"]) == 0
    printed = capsys.readouterr().out
    assert "(not installed: extra timm)" in printed
    assert printed.count("not installed") == sum(r.package is not None for r in RECIPES.values())
