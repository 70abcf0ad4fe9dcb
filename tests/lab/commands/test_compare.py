"""`neumann compare`: what it prints, and what it refuses."""

import re

import pytest

from neumann.lab.commands.main import main
from tests.support.torch_versions import needs_muon

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("no_report")
def test_prints_progress_table_and_places(tmp_path, capsys):
    words = ["compare", "--arms", "sgd", "adamw:lr=2e-3", "sgd:lr=1e30", "--target", "50"]
    words += ["--seeds", "1", "--epochs", "1", "--output", str(tmp_path / "x")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.out.count("adamw:lr=2e-3") == 1  # what the short name stands for
    assert "steps to" in printed.out
    assert "top-5, %" in printed.out
    assert f"records: {tmp_path / 'x'}" in printed.out
    assert "…" not in printed.out  # nothing is cut where it is not a terminal
    lines = printed.err.splitlines()
    assert re.fullmatch(r"2/3  adamw  seed 0  \d+\.\d\d %", lines[1])
    assert lines[2] == "3/3  sgd (lr 1e30)  seed 0  diverged"
    assert main(words) == 0
    assert capsys.readouterr().err.splitlines()[0] == "3/3  finished before"


@pytest.mark.usefixtures("no_report")
def test_logs_progress_inside_a_long_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("neumann.lab.commands.progress.LOG_SECONDS", 0.0)
    words = ["compare", "--arms", "sgd", "--seeds", "1", "--epochs", "2", "--log-every", "11"]
    assert main([*words, "--output", str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"0/1  sgd  seed 0  epoch 0\.5/2 loss \d\.\d{3}", lines[0])
    assert re.fullmatch(r"1/1  sgd  seed 0  \d+\.\d\d %", lines[-1])


@pytest.mark.usefixtures("no_report")
def test_prints_notes_below_the_table(tmp_path, capsys):
    words = ["compare", "--epochs", "1", "--output", str(tmp_path)]
    assert main([*words, "--arms", "neumann", "sgd", "adamw", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    warmup = "neumann: all 22 steps were its SGD warm-up; the Neumann iteration never began"
    assert lines[-4] == warmup
    assert lines[-3].startswith("p values are corrected for multiple comparisons")
    assert main([*words, "--arms", "sgd", "adamw", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"\n4 finished runs in {tmp_path} are not shown\n" in printed
    assert "never began" not in printed
    assert "corrected" not in printed
    assert main([*words, "--arms", "neumann", "sgd", "adamw", "--seeds", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "6/6  finished before\n"
    assert "not shown" not in printed.out


@pytest.mark.parametrize("command", ["compare", "sweep", "demo"])
def test_torchrun_is_refused(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command, "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"neumann: neumann {command} runs in one process")
    assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arms", ['"neumann"', "3", "[3]"])
def test_arms_in_a_file_must_be_a_list(arms, tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(f"arms = {arms}")
    assert main(["compare", "--config", str(file), "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert 'arms must be a list, as in ["neumann-spectral", "sgd"]; got ' in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("soap:rest_betas=3", "rest_betas must be two numbers in [0, 1)"),
        ("adamw:betas=3", "betas must be two numbers in [0, 1)"),
        # timm's Muon, which is for images, has this option
        pytest.param("muon:conv_mode=3", "unknown muon option 'conv_mode'", marks=needs_muon),
    ],
)
def test_wrong_options_are_found_before_any_data_is_read(command, arm, message, tmp_path, capsys):
    """Learning a vocabulary takes minutes, so a missing text shows that none was looked for."""
    words = [command, "--opt" if command == "train" else "--arms", arm]
    words += ["--data", f"text:{tmp_path}/missing.txt", "--tokens", "bpe:1024", "--model", "gpt"]
    assert main([*words, "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
