"""`neumann sweep`: what it refuses."""

import pytest

from neumann.lab.commands.main import main


@pytest.mark.parametrize(
    ("arm", "echo"),
    [
        ("adamw:betas=0.9/0.95", "adamw:betas=0.9/0.95"),
        ("adamw:lr=1.0:2:3,betas=3", "adamw:lr=1.0:2:3,betas=3"),
        ("a=adamw:betas=3@sched=step", "a=adamw:betas=3@sched=step: adamw:betas=3"),
    ],
)
def test_a_wrong_option_is_echoed_as_it_was_typed(arm, echo, tmp_path, capsys):
    """Not with a learning rate that the check has put in."""
    assert main(["sweep", "--arms", arm, "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"neumann: {echo}: betas must be two numbers in [0, 1)")
    assert not (tmp_path / "x").exists()


def test_an_arm_may_be_named_like_one_at_a_learning_rate(tmp_path, capsys):
    arms = ["a at 0.1=sgd:lr=0.001:0.1:3", "b=adamw:lr=1e-4:1e-2:3"]
    words = ["sweep", "--data", "digits", "--arms", *arms, "--epochs", "1", "--batch-size", "512"]
    assert main([*words, "--seeds", "1", "--output", str(tmp_path / "s")]) == 0
    assert "a at 0.1" in capsys.readouterr().out
