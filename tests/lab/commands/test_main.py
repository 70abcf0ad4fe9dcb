"""The command line: mistakes are one line with exit code 2, and written settings can be reused."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import neumann
from neumann.lab.commands.main import main
from neumann.lab.commands.parser import COMMANDS, parse_flags
from neumann.lab.commands.summaries import SUMMARIES
from neumann.lab.storage.reading import read_config
from tests.support.processes import PROCESS_TIMEOUT
from tests.support.texts import make_documents, write_documents


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in COMMANDS:
        assert f" {command} " in printed
    assert main([]) == 2
    assert list(COMMANDS) == list(SUMMARIES)


def test_help_is_a_command_too(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for words in (["help"], ["help", "help"], ["help", "--help"], ["-h"]):
        assert main(words) == 0
        assert capsys.readouterr().out == listed
    assert main(["train", "--help"]) == 0
    of_train = capsys.readouterr().out
    assert main(["help", "train"]) == 0
    assert capsys.readouterr().out == of_train
    assert main(["help", "train", "compare"]) == 2
    message = "neumann: help explains one command at a time, got 'train compare'\n"
    assert capsys.readouterr().err == message
    assert main(["help", "trian"]) == 2
    assert capsys.readouterr().err == "neumann: unknown command 'trian'; did you mean train?\n"


@pytest.mark.parametrize(
    "command", ["train", "compare", "sweep", "study", "spectrum", "demo", "report"]
)
@pytest.mark.parametrize("width", [80, 120])
def test_help_of_a_command_fits_the_terminal(command, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: neumann {command}" in printed
    assert max(map(len, printed.splitlines())) <= max(width, 100)
    if command != "report":
        assert "(default: " in printed
        assert ("--config FILE" in printed) == (command != "study")  # it is a file already


def test_without_the_extra_the_command_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "neumann.lab.commands.parser", None)
    assert main(["train"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("neumann: the command neumann needs the extra `lab`: run `pip ")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"neumann {neumann.__version__}\n"


@pytest.mark.parametrize(("opt", "warns"), [("neumann", True), ("neumann:warmup_epochs=0", False)])
def test_training_warns_of_a_warm_up_that_covers_the_run(opt, warns, tmp_path, capsys):
    words = ["--data", "digits", "--model", "mlp", "--batch-size", "718", "--epochs", "1"]
    assert main(["train", *words, "--opt", opt, "--output", str(tmp_path / "run")]) == 0
    assert ("SGD warm-up of 10 steps covers all of the run's 2" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train"),
        (["train", "--epoch", "3"], "unknown flag '--epoch'; did you mean --epochs"),
        (["train", "--epoch=3"], "unknown flag '--epoch'; did you mean --epochs"),
        (["train", "--bs", "3"], "unknown flag '--bs'; did you mean --batch-size?"),
        (["sweep", "--wd=1"], "unknown flag '--wd'; did you mean --weight-decay?"),
        (["train", "--learning-rate", "1"], "unknown flag '--learning-rate'; did you mean --lr?"),
        (["compare", "--arm", "sgd"], "unknown flag '--arm'; did you mean --arms"),
        (["train", "sgd"], "unexpected argument 'sgd'; neumann train --help"),
        (["train", "--epochs", "x"], "--epochs must be a whole number, got 'x'"),
        (["train", "--epochs", "1.5"], "--epochs must be a whole number, got '1.5'"),
        (["train", "--epochs"], "--epochs needs a value"),
        (["train", "--lr", "fast"], "--lr must be a number, got 'fast'"),
        (["train", "--smoothing", "x"], "--smoothing must be a number, got 'x'"),
        (["train", "--micro-batch-size", "x"], "--micro-batch-size must be a whole number"),
        (["train", "--sched", "cosin"], "unknown --sched 'cosin'; did you mean cosine"),
        (["compare", "--arms"], "--arms must name at least one optimizer"),
        (["sweep", "--lr", "0.1"], "--lr must be LOW:HIGH:COUNT"),
        (["demo", "--seeds", "0"], "--seeds must be at least 1"),
        (["report"], "neumann report needs the folder"),
        (["report", "--flag"], "unknown flag '--flag'"),
        (["train", "--config"], "--config needs a file"),
        (["train", "--help", "--config"], "--config needs a file"),
        (["help", "train", "--config"], "--config needs a file"),
        (["train", "--epochs", "--lr", "1"], "--epochs needs a value"),
        (["train", "--download", "--epochs"], "--epochs needs a value"),
        (["train", "--no-flip=3"], "unexpected argument '3'"),
    ],
)
def test_usage_errors_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"neumann: {message}")
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", 'epochs = "many"', "--epochs must be a whole number, got 'many'"),
        ("a.toml", "epochs = 1.5", "--epochs must be a whole number, got '1.5'"),
        ("a.toml", 'sched = "cosin"', "unknown --sched 'cosin'; did you mean cosine"),
        ("a.toml", "epoch = 3", "unknown setting 'epoch'; did you mean epochs"),
        ("a.json", "{}", "holds no settings of a run"),
        ("a.json", "[1", "is damaged"),
    ],
)
def test_config_file_errors_are_one_line(name, text, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(["train", "--config", name]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == [name]


@pytest.mark.slow
def test_usage_errors_are_one_line_in_a_terminal():
    """In a terminal tyro would draw boxes in color."""
    if shutil.which("script") is None:
        pytest.skip("needs the command script, which makes a terminal")
    words = f"{sys.executable} -m neumann train --sched cosin"
    done = subprocess.run(
        ["script", "-qec", words, "/dev/null"],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        timeout=PROCESS_TIMEOUT,
    )
    expected = b"neumann: unknown --sched 'cosin'; did you mean cosine?\r\n"
    assert (done.returncode, done.stdout) == (2, expected)


def test_written_run_config_can_be_reused(tmp_path):
    words = ["train", "--opt", "adamw:betas=(0.8,0.9)", "--epochs", "1", "--smoothing", "0.1"]
    assert main([*words, "--target", "50", "--output", str(tmp_path / "a")]) == 0
    kept = tmp_path / "a" / "config.json"
    assert main(["train", f"--config={kept}", "--seed", "3", "--output", str(tmp_path / "b")]) == 0
    first, second = (read_config(tmp_path / name) for name in "ab")
    assert {**first, "seed": 3} == second


@pytest.mark.usefixtures("no_report")
def test_written_comparison_can_be_reused(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('arms = ["sgd", "adamw:lr=0.01"]\nseeds = 1\nepochs = 1\nlr = 0.1\n')
    assert main(["compare", "--config", str(file), "--output", str(tmp_path / "a")]) == 0
    kept = str(tmp_path / "a" / "comparison.json")
    assert main(["compare", "--config", kept, "--output", str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / n / "comparison.json").read_text()) for n in "ab")
    assert first == second
    assert first["settings"]["lr"] == 0.1


def test_flags_override_the_config_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("epochs = 3\nlr = 0.1\nflip = false\nmicro-batch-size = 8\n")
    config = parse_flags("train", ["--lr", "0.2", f"--config={file}"])
    assert (config.epochs, config.lr, config.flip, config.micro_batch_size) == (3, 0.2, False, 8)
    assert (config.batch_size, config.model) == (64, "mlp")


def test_ctrl_c_prints_one_line(monkeypatch, capsys):
    def interrupt(config, ranks):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("neumann.lab.config.TrainConfig.resolve", interrupt)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "neumann: stopped by SIGINT\n"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_too_little_memory_is_one_line(error, monkeypatch, capsys):
    def fail(config, ranks):
        raise error

    monkeypatch.setattr("neumann.lab.config.TrainConfig.resolve", fail)
    assert main(["train"]) == 1
    assert capsys.readouterr().err.startswith("neumann: there is not enough memory: choose a")


def test_a_model_that_is_too_large_is_one_line(tmp_path, capsys):
    text = write_documents(tmp_path / "pages.txt", make_documents(40))
    words = ["--data", f"text:{text}", "--tokens", "bytes", "--context", "8"]
    words += ["--model", "gpt:width=999936,depth=1", "--output", str(tmp_path / "run")]
    assert main(["train", *words, "--batch-size", "4"]) == 1
    assert "there is not enough memory" in capsys.readouterr().err


def test_sigterm_prints_one_line(monkeypatch, capsys):
    def interrupt(config, ranks):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("neumann.lab.config.TrainConfig.resolve", interrupt)
    assert main(["train"]) == 143
    assert capsys.readouterr().err == "neumann: stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_closed_pipe_is_silent():
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "neumann", "train", "--help"]
    done = subprocess.run(
        words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=PROCESS_TIMEOUT
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_missing_report_package_is_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "neumann.lab.report", None)  # as if it could not be imported
    words = ["compare", "--arms", "sgd", "--seeds", "1", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    assert 'run `pip install ".[lab]"`' in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2


@pytest.mark.slow
def test_report_prints_its_path(tmp_path, capsys):
    assert main(["train", "--epochs", "1", "--output", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "a")]) == 0
    path = capsys.readouterr().out.strip()
    assert path.startswith(str(tmp_path / "a"))
    assert os.path.getsize(path) > 0
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
