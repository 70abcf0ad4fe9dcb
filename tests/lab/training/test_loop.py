"""Training: it learns, stops cleanly, and resumes with the same bits."""

import dataclasses
import json
import os
import random
import shutil
import signal
import time

import pytest
import torch

from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.optimizers.arm_recipes import RECIPES
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.inputs import plan_epoch
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import Diverged
from neumann.lab.training.signals import Interrupted
from tests.support.programs import Program, run

FLAGS = ["--opt", "neumann:warmup_epochs=1", "--lr", "0.1", "--epochs", "6", "--log-every", "7"]


def final(folder):
    """What two runs must share: weights, state and records, without the times."""
    found = Checkpoints(folder / "checkpoints").load_latest()
    lines = [{k: v for k, v in m.items() if k != "seconds"} for m in read_metrics(folder)]
    summary = {k: v for k, v in read_summary(folder).items() if not k.endswith("seconds")}
    return found.payload["model"], found.payload["optimizer"]["state"], lines, summary


def same(ours, theirs):
    (model, state, *rest), (other, other_state, *other_rest) = ours, theirs
    return (
        all(torch.equal(model[name], other[name]) for name in other)
        and all(torch.equal(state[i][k], other_state[i][k]) for i in state for k in state[i])
        and rest == other_rest
    )


def command(folder):
    return ["-m", "neumann", "train", *FLAGS, "--output", str(folder), "--resume", "auto"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", *FLAGS, "--output", str(folder)]) == 0
    return folder


def test_a_run_learns_and_records_it(whole):
    summary = read_summary(whole)
    assert summary["accuracy"] > 85
    lines = read_metrics(whole)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4, 5, 6]
    assert epochs[-1]["accuracy"] == summary["accuracy"]
    assert {line["optimizer"]["phase"] for line in lines if line["kind"] == "step"} >= {
        "warm-up",
        "iterate",
    }
    config = json.loads((whole / "config.json").read_text())
    assert config["config"]["opt"] == "neumann:warmup_epochs=1"


def test_a_neumann_run_records_its_timetable_once(whole, tmp_path):
    """6 epochs of 22 steps: one of warm-up, then resets at t = 1, 1 + 10 epochs, …"""
    lines = read_metrics(whole)
    assert lines[0] == {"kind": "timetable", "step": 0, "warmup_steps": 22, "resets": [23]}
    assert [line["kind"] for line in lines].count("timetable") == 1
    config = TrainConfig(
        opt="neumann:warmup_steps=2,reset_steps=3", batch_size=256, epochs=4, log_every=1
    ).resolve()
    seen = []

    def stop(line):
        seen.append(line)
        if len(seen) == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        Training(config, Process()).run(tmp_path / "run", stop)
    resumed = dataclasses.replace(config, resume="auto")
    Training(resumed, Process()).run(tmp_path / "run")
    first, *rest = read_metrics(tmp_path / "run")
    assert first["resets"] == [3, 6, 12]  # intervals of 3, 6 and 12 steps; the run has 20
    steps = [line for line in rest if line["kind"] == "step"]
    found = [line["step"] for line in steps if line["optimizer"]["phase"] == "reset"]
    assert found == first["resets"]
    assert "timetable" not in {line["kind"] for line in [*rest, *seen]}


def test_a_neumann_run_records_its_forces_beside_the_gradient(tmp_path):
    options = "warmup_steps=1,reset_steps=0,cubic=0.5,repulsive=1e-4,variables=1,bounded=false"
    config = TrainConfig(opt=f"neumann:{options}", batch_size=512, epochs=3, log_every=1)
    training = Training(config.resolve(), Process())
    seen = []

    def compare(line):
        if line["kind"] == "step":
            gradient = torch.cat([p.grad.flatten() for p in training.learner.model.parameters()])
            assert line["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
            seen.append(line["optimizer"])

    training.run(tmp_path / "run", compare)
    assert len(seen) == 6
    for report in seen[2:]:
        (group,), r = report["groups"], report["distance"]
        assert group["cubic_force"] == pytest.approx(0.5 * r**2, rel=1e-5)
        assert group["repulsive_force"] == pytest.approx(1e-4 / r**2, rel=1e-5)


def test_other_optimizers_have_no_timetable(tmp_path):
    config = TrainConfig(opt="sgd", batch_size=512, epochs=1).resolve()
    Training(config, Process()).run(tmp_path / "run")
    assert {line["kind"] for line in read_metrics(tmp_path / "run")} == {"step", "epoch"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_a_signal_resumes_with_the_same_bits(whole, tmp_path, number):
    folder = tmp_path / "run"
    with Program(*command(folder)) as program:
        wait_for(folder / "metrics.jsonl", program)
        program.send_signal(number)
        stopped = program.wait()
    assert stopped.returncode == 128 + number, stopped.stderr
    assert "--resume auto continues" in stopped.stderr
    assert read_summary(folder) is None
    done = run(*command(folder))
    assert done.returncode == 0, done.stderr
    assert same(final(folder), final(whole))


def wait_for(file, program):
    while not (file.exists() and file.stat().st_size) and program.poll() is None:
        time.sleep(0.01)


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_run_stopped_after_any_step_of_an_epoch_resumes_with_the_same_records(tmp_path, last):
    """Also after the last one, when the epoch has not been evaluated yet."""
    config = TrainConfig(batch_size=512, epochs=2, log_every=1, resume="auto").resolve()

    def stop(line):
        if line["kind"] == "step" and line["step"] == last:
            os.kill(os.getpid(), signal.SIGTERM)

    Training(config, Process()).run(tmp_path / "whole")
    with pytest.raises(Interrupted):
        Training(config, Process()).run(tmp_path / "stopped", stop)
    Training(config, Process()).run(tmp_path / "stopped")
    assert same(final(tmp_path / "stopped"), final(tmp_path / "whole"))


@pytest.mark.slow
def test_killed_at_random_moments(whole, tmp_path):
    folder = tmp_path / "run"
    moments = random.Random(0)
    for _ in range(4):
        with Program(*command(folder)):
            time.sleep(moments.uniform(0.1, 1.0))
    done = run(*command(folder))
    assert done.returncode == 0, done.stderr
    assert same(final(folder), final(whole))


def test_a_finished_run_is_not_repeated(whole, capsys):
    before = (whole / "summary.json").stat().st_mtime_ns
    assert main(["train", *FLAGS, "--output", str(whole), "--resume", "auto"]) == 0
    assert (whole / "summary.json").stat().st_mtime_ns == before


def test_divergence_names_step_lr_and_checkpoint(tmp_path):
    config = TrainConfig(opt="sgd", lr=1e20, epochs=2, log_every=5).resolve()
    with pytest.raises(
        Diverged, match=r"not finite in step \d+ at lr .*e\+19; there is no checkpoint"
    ):
        Training(config, Process()).run(tmp_path / "run")
    assert read_summary(tmp_path / "run")["diverged"]["step"] == 2
    again = dataclasses.replace(config, resume="auto")
    with pytest.raises(Diverged, match="not finite in step 2"):
        Training(again, Process()).run(tmp_path / "run")


def test_micro_batches_add_up_to_the_batch(tmp_path):
    """Without BatchNorm accumulation changes nothing but rounding."""
    accuracies = []
    for size in (None, 16):
        config = TrainConfig(model="mlp", opt="sgd", epochs=2, micro_batch_size=size).resolve()
        accuracies.append(Training(config, Process()).run(tmp_path / str(size)))
    assert accuracies[0].train_loss == pytest.approx(accuracies[1].train_loss, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--opt", "sgdd"], "did you mean sgd"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--batch-size", "100000"], "larger than the training set"),
        (["--model", "resnet8"], "did you mean resnet9 or resnet18?"),
        (["--data", "cifar"], "did you mean cifar10 or cifar100"),
        (["--config", "none.toml"], "none.toml"),
        (["--ramp-epochs", "99"], "--ramp-epochs must be between"),
        (["--opt", "neumann:lr=abc"], "lr must be a number, got abc"),
        (["--opt", "sgd:lr=1e-4:1e-2:7"], "lr must be a number, got 1e-4:1e-2:7"),
        (["--opt", "sgd:weight_decay=abc"], "weight_decay must be a number, got abc"),
        (["--opt", "sgd:fused=true,foreach=true"], "sgd:fused=true,foreach=true"),
        (["--weight-decay", "-1"], "--weight-decay must be a number of at least 0, got -1"),
        (["--weight-decay", "nan"], "--weight-decay must be a number of at least 0, got nan"),
        (["--opt", "neumann:state_dtype=int8"], "state_dtype must be None, torch.bfloat16"),
        (["--device", "meta"], "--device must be auto, cpu, cuda or cuda:N"),
        (["--seed", str(2**80)], "--seed must be from 0 to"),
        (["--output", ""], "--output must not be the working folder"),
        (
            ["--data", "synthetic:3x8x8,4,64", "--model", "resnet9", "--batch-size", "1"],
            "BatchNorm in resnet9 needs more than one example",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_another_config_in_the_folder_is_refused(whole, capsys):
    assert main(["train", *FLAGS, "--seed", "1", "--output", str(whole)]) == 2
    assert "seed" in capsys.readouterr().err


def test_a_toml_file_sets_flags(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('opt = "sgd"\nepochs = 1\nbatch-size = 32\n')
    folder = tmp_path / "run"
    assert main(["train", "--config", str(file), "--seed", "3", "--output", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())["config"]
    assert (config["opt"], config["batch_size"], config["seed"]) == ("sgd", 32, 3)


@pytest.mark.parametrize("arm", RECIPES)
def test_every_optimizer_trains(arm, tmp_path):
    config = TrainConfig(opt=arm, epochs=1, batch_size=256, checkpoint_every=0)
    summary = Training(config.resolve(), Process()).run(tmp_path / "run")
    assert summary.train_loss < 2.5  # from log 10 at the beginning, or on its way down
    resumed = Training(dataclasses.replace(config, resume="auto").resolve(), Process())
    assert resumed.run(tmp_path / "run") == summary


def test_tensorboard_has_the_records(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrainConfig(opt="neumann:warmup_epochs=1", lr=0.1, epochs=2, tensorboard=True)
    Training(config.resolve(), Process()).run(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "epoch"]
    written = [(event.step, event.value) for event in events.Scalars("epoch/accuracy")]
    assert written == [(line["step"], pytest.approx(line["accuracy"])) for line in lines]
    assert "optimizer/distance" in events.Tags()["scalars"]
    assert "step/lr" in events.Tags()["scalars"]


def test_a_run_is_not_overwritten_even_without_a_checkpoint(tmp_path, capsys):
    flags = ["train", "--opt", "sgd", "--epochs", "1", "--output", str(tmp_path / "run")]
    assert main(flags) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "summary.json").read_bytes()
    assert main(flags) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_a_last_step_that_overshoots_is_a_divergence(tmp_path):
    """A loss is measured before its step, so only the evaluation sees what the last one did."""
    config = TrainConfig(opt="sgd:lr=1e38", batch_size=1437, epochs=1).resolve()
    with pytest.raises(Diverged) as caught:
        Training(config, Process()).run(tmp_path / "run")
    assert caught.value.step == 1
    assert caught.value.checkpoint is None
    assert "diverged" in read_summary(tmp_path / "run")


@pytest.mark.parametrize(("batch", "most", "pieces"), [(50, 16, 5), (64, 16, 4), (64, 100, 1)])
def test_the_number_of_micro_batches(batch, most, pieces):
    config = TrainConfig(opt="sgd", batch_size=batch, micro_batch_size=most).resolve()
    learner = Learner(config, Process())
    assert plan_epoch(learner.config, learner.process, 0).micro_batches == pieces


def test_every_option_of_the_optimizer_can_be_named(tmp_path):
    config = TrainConfig(opt="neumann:state_dtype=bfloat16,warmup_epochs=0", epochs=1).resolve()
    training = Training(config, Process())
    training.run(tmp_path / "run")
    states = training.learner.optimizer.state.values()
    assert all(state["iterate"].dtype == torch.bfloat16 for state in states)
