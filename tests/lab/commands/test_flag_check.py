"""Wrong flags are refused, and help is printed, before torch is imported."""

import subprocess
import sys

import pytest

from neumann.lab.commands.flag_check import check_words
from neumann.lab.commands.flags import SETTINGS
from neumann.lab.commands.main import main
from neumann.lab.errors import UsageError
from tests.support.processes import PROCESS_TIMEOUT

QUICK = [
    ["--help"],
    ["help"],
    ["help", "train"],
    *([command, "--help"] for command in SETTINGS),
    ["trian"],
    ["train", "--epoch", "3"],
    ["train", "--epochs", "x"],
    ["train", "--epochs"],
    ["train", "--opt"],
    ["train", "--amp", "on"],
    ["train", "sgd"],
    ["compare", "--optimizer", "x"],
    ["compare", "--arms"],
    ["study", "a.toml", "--set"],
    ["spectrum", "--operators", "hessian"],
    ["demo", "--bs", "3"],
]


def test_no_help_and_no_wrong_flag_waits_for_torch():
    script = (
        "import sys\n"
        "from neumann.lab.commands.main import main\n"
        f"codes = [main(words) for words in {QUICK}]\n"
        "print(codes)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT,
    )
    helps = sum("help" in words or "--help" in words for words in QUICK)
    codes = [0] * helps + [2] * (len(QUICK) - helps)
    assert done.stdout.splitlines()[-1] == str(codes)
    assert done.stderr.count("\n") == len(QUICK) - helps


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "3", "--lr=-1", "--lr", "-1e-3", "--no-flip", "--download", "--no-download"],
        ["--batch_size", "3", "--opt=sgd:lr=0.1", "--config", "a.toml", "--allow-code=a:b"],
        ["--amp", "bf16", "--channels-last=off", "--resume", "auto", "--output", "-"],
    ],
)
def test_good_flags_pass(words):
    check_words("train", words)


def test_arguments_and_lists_pass():
    check_words("study", ["a.toml", "--set", "epochs=1", "lr=2", "--jobs", "2"])
    check_words("compare", ["--arms=sgd", "adamw", "--seeds", "2"])


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", ["--opt", "--lr", "1"], "--opt needs a value; --opt help lists the optimizers"),
        ("sweep", ["--arms"], "--arms must name at least one optimizer; --arms help lists them"),
        ("train", ["--config"], "--config needs a file"),
        ("train", ["--allow-code"], "--allow-code needs MODULE:FUNCTION"),
        ("train", ["--flip=yes"], "unexpected argument 'yes'; neumann train --help"),
        ("train", ["--amp", "on"], "unknown --amp 'on'; choose from: auto, bf16, off"),
        ("study", ["a.toml", "b.toml"], "unexpected argument 'b.toml'"),
        ("demo", ["--jobs", "2", "3"], "unexpected argument '3'"),
        ("report", ["--config", "a"], "unknown flag '--config'"),
    ],
)
def test_wrong_words(command, words, message):
    with pytest.raises(UsageError) as error:
        check_words(command, words)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        ["report", "--", "-x"],
        ["study", "--", "-x.toml"],
        ["train", "--output", "-1x"],
        ["sweep", "--lr", "-1:2:3"],
        ["spectrum", "--parameters"],
        ["train", "--batch_size", "8"],
    ],
)
def test_what_tyro_understands_passes(words):
    check_words(words[0], words[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--", "x"], "unexpected argument 'x'"),
        (["train", "--ramp", "-5%"], "--ramp must be a share of the run"),
        (["train", "--config", "-1e3"], "--config needs a"),
        (["train", "--allow_code", "a:b"], "did you mean --allow-code?"),
        (["compare", "--arms"], "--arms must name at least one optimizer"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_the_help_comes_before_mistakes(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text("epochs = 3\n")
    assert main(["train", "--config", str(file), "--bogus", "--help"]) == 0
    assert "(default: 3)" in capsys.readouterr().out
    file.write_text("arms = []\n")
    assert main(["compare", "--config", str(file)]) == 2
    assert "--arms must name at least one optimizer" in capsys.readouterr().err


def test_without_source_there_is_no_early_check(monkeypatch):
    def find_nothing(command):
        raise FileNotFoundError("config.py")

    monkeypatch.setattr("neumann.lab.commands.flag_check.list_flags", find_nothing)
    check_words("train", ["--nonsense"])  # tyro refuses it later
