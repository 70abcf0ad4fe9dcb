"""Code named in a file runs only with --allow-code; code named on the command line runs."""

import json
import os
import subprocess
import sys

import pytest

from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.user_code import call_user_function
from tests.support.damage import read_payload, seal
from tests.support.processes import PROCESS_TIMEOUT

SMALL = ["--data", "synthetic:4,2,16", "--batch-size", "16", "--epochs", "1", "--device", "cpu"]
CODE = """
from pathlib import Path

with open(Path(__file__).parent / "ran", "a") as file:
    file.write("imported\\n")

def make():
    from neumann.optim.preconditioners import Diagonal
    return Diagonal()

def entry():
    import torch
    model = torch.nn.Linear(2, 1)
    return model, torch.nn.functional.mse_loss, (torch.ones(3, 2), torch.ones(3, 1))
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The name of a module in the working folder that leaves a file behind when it is imported."""
    name = f"named_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def refused(words, file, named, capsys):
    """The command names the file, the code and the flag, in one line, and runs nothing."""
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in (file, named, f"--allow-code {named}"):
        assert part in error
    assert not os.path.exists("ran")
    return True


@pytest.fixture
def folder(code, tmp_path):
    """A run of someone else whose optimizer is code in the working folder."""
    folder = tmp_path / "run"
    config = TrainConfig(
        opt="neumann:precondition=diagonal",
        data="synthetic:4,2,16",
        batch_size=16,
        epochs=1,
        device="cpu",
    )
    Training(config.resolve(), Process()).run(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content["config"]["opt"] = f"neumann:precondition={code}:make"
    file.write_text(json.dumps(content))
    (checkpoint,) = (folder / "checkpoints").iterdir()
    payload = read_payload(checkpoint)
    payload["config"]["opt"] = content["config"]["opt"]
    seal(checkpoint, payload)
    return folder


def test_a_run_folder_runs_no_code(folder, code, capsys):
    named = f"{code}:make"
    for words in (
        ["spectrum", "--checkpoint", "run", "--max-products", "2"],
        ["train", "--config", "run/config.json", "--output", "new"],
        ["train", "--config", "run/config.json", "--output", "run", "--resume", "auto"],
    ):
        assert refused(words, "run/config.json", named, capsys)
    assert refused([*words, "--allow-code", f"{code}:entry"], "config.json", named, capsys)


def test_the_folder_runs_the_code_that_the_user_allows(folder, code):
    words = ["spectrum", "--checkpoint", "run", "--max-products", "2"]
    assert main([*words, "--allow-code", "other:one", "--allow-code", f"{code}:make"]) == 0
    assert os.path.exists("ran")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_settings_file_runs_no_code(code, suffix, capsys):
    arm, named = f"neumann:precondition={code}:make", f"{code}:make"
    cases = (("train", "opt", arm), ("compare", "arms", ["sgd", arm]), ("sweep", "arms", [arm]))
    for command, key, value in cases:
        text = json.dumps({"config": {key: value}}) if suffix == "json" else f"{key} = {value!r}"
        file = f"{command}.{suffix}"
        with open(file, "w") as opened:
            opened.write(text)
        assert refused([command, *SMALL, "--config", file, "--output", "x"], file, named, capsys)
    # What a flag replaces does not run, so it needs no permission.
    words = ["train", *SMALL, "--config", f"train.{suffix}", "--opt", "sgd"]
    assert main([*words, "--output", "other"]) == 0
    assert not os.path.exists("ran")
    words = ["train", *SMALL, "--config", f"train.{suffix}", "--output", "allowed"]
    assert main([*words, f"--allow-code={named}"]) == 0
    assert os.path.exists("ran")


def test_an_entry_in_a_file_is_code_too(code, capsys):
    with open("s.toml", "w") as file:
        file.write(f'entry = "{code}:entry"')
    assert refused(["spectrum", "--config", "s.toml"], "s.toml", f"{code}:entry", capsys)


def test_a_file_cannot_allow_code(code, capsys):
    arm = f"neumann:precondition={code}:make"
    for command, key, value in (("train", "opt", arm), ("spectrum", "entry", f"{code}:entry")):
        with open("s.toml", "w") as file:
            file.write(f'{key} = "{value}"\nallow_code = ["{code}:make", "{code}:entry"]')
        assert main([command, "--config", "s.toml"]) == 2
        assert "unknown setting 'allow_code'" in capsys.readouterr().err
    assert not os.path.exists("ran")


@pytest.mark.usefixtures("no_report")
def test_code_on_the_command_line_runs(code):
    arm = f"neumann:precondition={code}:make,lr=0.01"
    words = ["train", *SMALL, "--opt", arm, "--output", "a"]
    assert main(words) == 0
    assert main([*words, "--resume", "auto"]) == 0
    # It repeats what the file names, so the user has named it.
    assert main(["train", "--config", "a/config.json", "--opt", arm, "--output", "b"]) == 0
    words = ["compare", *SMALL, "--arms", arm, "--seeds", "1", "--output", "c"]
    assert main(words) == 0
    assert main(words) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_the_permission_reaches_the_workers(code):
    with open("c.toml", "w") as file:
        file.write(f'arms = ["neumann:precondition={code}:make,lr=0.01"]')
    words = ["compare", *SMALL, "--config", "c.toml", "--seeds", "2", "--jobs", "2"]
    assert main([*words, "--output", "c", "--allow-code", f"{code}:make"]) == 0
    with open("ran") as file:
        assert len(file.readlines()) == 3  # the check before the start, and two workers


def test_code_that_exits_is_an_error(tmp_path, code, capsys):
    (tmp_path / f"{code}.py").write_text("import sys\nsys.exit('enough')\n")
    assert main(["spectrum", "--entry", f"{code}:entry"]) == 2
    assert "enough" in capsys.readouterr().err


def test_allow_code_needs_a_name_and_a_command_that_runs_code(capsys):
    assert main(["train", "--allow-code"]) == 2
    assert capsys.readouterr().err == "neumann: --allow-code needs MODULE:FUNCTION\n"
    assert main(["report", "--allow-code", "a:b", "x"]) == 2
    assert capsys.readouterr().err.startswith("neumann: unknown flag '--allow-code'")


def test_a_message_cannot_drive_the_terminal(tmp_path, capsys):
    file = tmp_path / "s.toml"
    file.write_text('opt = "neumann:precondition=a\\u001b[2J:b; ls"')
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "--allow-code 'a" in error  # quoted for a shell


def test_installed_modules_come_before_those_of_the_working_folder(tmp_path, monkeypatch):
    """A folder full of files named like packages must not replace these."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("tabnanny", "mine_alone"):
        (tmp_path / f"{name}.py").write_text("def make():\n    return 'ours'\n")
    sys.modules.pop("tabnanny", None)
    with pytest.raises(UsageError, match=r"another module tabnanny.*rename"):
        call_user_function("tabnanny:make", "--entry")
    assert str(tmp_path) not in sys.path
    assert call_user_function("mine_alone:make", "--entry") == "ours"
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.slow
def test_python_m_does_not_import_from_the_working_folder(tmp_path):
    """`python -m` puts the working folder first; packages that we import later must not come
    from there."""
    for name in ("timm", "matplotlib", "sklearn", "jinja2", "tyro", "rich", "filelock"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').write(__name__)\n")
    words = [sys.executable, "-m", "neumann", "train", *SMALL, "--opt", "lamb", "--output", "run"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=PROCESS_TIMEOUT
    )
    assert not (tmp_path / "ran").exists()
    assert done.returncode == 0, done.stderr
