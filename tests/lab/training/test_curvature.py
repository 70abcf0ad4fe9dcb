"""Curvature during a run: correct, recorded once, and without effect on the training."""

import dataclasses
import io
import os
import random
import signal

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import distributed, nn

from neumann.lab.commands import progress
from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.data import load
from neumann.lab.errors import UsageError
from neumann.lab.optimizers.arms import Arm, build_optimizer
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.curvature import (
    Curvature,
    current_momentum,
    extremes_as_dict,
    load_probe_batch,
)
from neumann.lab.training.inputs import plan_epoch
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import Diverged
from neumann.lab.training.signals import Interrupted
from neumann.spectrum import Extreme, Extremes, Hessian, extremes

pytestmark = pytest.mark.slow

IMAGES = TrainConfig(  # BatchNorm, and 8 steps an epoch
    data="synthetic:1x4x4,4,64",
    model="cnn",
    opt="neumann:warmup_epochs=1,lr=0.05",
    batch_size=8,
    epochs=2,
    log_every=3,
    spectrum_products=6,
).resolve()


def train(config, folder, observe=lambda line: None, **changes):
    training = Training(dataclasses.replace(config, **changes), Process())
    training.run(folder, observe)
    return training


def lines(folder, kind="spectrum"):
    return [line for line in read_metrics(folder) if line["kind"] == kind]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run with measurements in the middle of epochs."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    train(IMAGES, folder, spectrum_every=5)
    return folder


def equal(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return ours == theirs


def kept(folder):
    """All that a checkpoint holds, without times and config: weights, optimizer, generators."""
    payload = Checkpoints(folder / "checkpoints").load_latest().payload
    payload["last"].pop("seconds")
    del payload["config"]
    return {key: value for key, value in payload.items() if "seconds" not in key}


@pytest.mark.slow
def test_measuring_does_not_change_the_training(measured, tmp_path):
    train(IMAGES, tmp_path / "run")
    assert equal(kept(measured), kept(tmp_path / "run"))
    assert lines(measured, "step") == lines(tmp_path / "run", "step")
    assert not lines(tmp_path / "run")


def test_lines_come_before_the_first_step_every_n_and_after_the_last(measured):
    found = lines(measured)
    assert [line["step"] for line in found] == [0, 5, 10, 15, 16]
    assert [line["epoch"] for line in found] == [0, 5 / 8, 10 / 8, 15 / 8, 2]
    assert [line["momentum"] for line in found][:2] == [0, 0]  # the warm-up
    assert found[-1]["momentum"] > 0.5
    recorded = {line["step"]: line["lr"] for line in lines(measured, "step")}
    assert found[3]["lr"] == recorded[15]
    assert found[0]["lr"] == 0.05
    for line in found:
        assert line["about"] == {
            "matrix": "hessian",
            "parameters": found[0]["about"]["parameters"],
            "dtype": "float32",
            "device": "cpu",
            "batchnorm": "batch",
            "randomness": None,
            "weight_decay": 0.0,
        }
        for batch in (line["probe"], line["current"]):
            assert batch["examples"] == 8
            assert batch["products"] <= 6
            assert batch["smallest"] < batch["largest"]
            assert 0 < batch["implied_momentum_outside"] < 1
            assert 0 < batch["implied_momentum"] <= 1
            assert batch["implied_lr_outside"] < batch["implied_lr"]
            assert batch["implied_lr"] == 1 / batch["largest"]
    assert not found[0]["probe"]["smallest_converged"]  # 6 products are not enough


@pytest.mark.slow
def test_the_values_match_a_separate_measurement_within_their_errors(tmp_path):
    """The first and the last step, measured again and more closely."""
    config = dataclasses.replace(IMAGES, spectrum_every=100, spectrum_products=60, epochs=1)
    learner = train(config, tmp_path / "run").learner
    first, last = lines(tmp_path / "run")
    current = [
        pieces[0]
        for pieces in learner.dataset.train.batches(plan_epoch(config, learner.process, 0))
    ]
    probe = load_probe_batch(learner.dataset, 8)
    assert not any(torch.equal(probe[0], inputs) for inputs, _ in current)
    fresh = Learner(config, Process())
    for at, line, batch in ((fresh, first, current[0]), (learner, last, current[-1])):
        for name, data in (("probe", probe), ("current", batch)):
            operator = Hessian(at.model, nn.functional.cross_entropy, batch=data)
            found = extremes(operator, tolerance=1e-4, max_products=100, seed=7)
            for end in ("smallest", "largest"):
                exact = getattr(found, end)
                distance = abs(line[name][end] - exact.value)
                assert distance <= line[name][f"{end}_error"] + exact.error
                assert line[name][f"{end}_converged"]


@pytest.mark.slow
def test_a_resumed_run_has_each_line_once(measured, tmp_path):
    def stop(line):
        if line["kind"] == "spectrum" and line["step"] == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(IMAGES, tmp_path / "run", stop, spectrum_every=5)
    train(IMAGES, tmp_path / "run", spectrum_every=5, resume="auto")
    assert lines(tmp_path / "run") == lines(measured)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_has_each_line_once(measured, tmp_path):
    class Killed(BaseException):
        pass

    def die(line):
        raise Killed

    with pytest.raises(Killed):
        train(IMAGES, tmp_path / "run", die, spectrum_every=5)
    assert len(lines(tmp_path / "run")) == 1
    train(IMAGES, tmp_path / "run", spectrum_every=5, resume="auto")
    assert lines(tmp_path / "run") == lines(measured)


def test_a_diverging_run_ends_as_diverged(tmp_path):
    config = TrainConfig(opt="sgd", lr=1e20, epochs=1, spectrum_every=1, spectrum_products=3)
    with pytest.raises(Diverged, match="not finite in step 2"):
        train(config.resolve(), tmp_path / "run")
    assert read_summary(tmp_path / "run")["diverged"]["step"] == 2
    before, after = lines(tmp_path / "run")
    assert before["probe"]["largest"] > 0
    assert "NaN or infinity" in after["probe"]["failed"]
    assert "NaN or infinity" in after["current"]["failed"]


def test_a_measurement_restores_everything():
    dataset = load("synthetic:1x8x8,4,64")
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 4)
    )
    model[1].eval()
    optimizer = build_optimizer(Arm.parse("sgd"), model, steps_per_epoch=4)
    config = dataclasses.replace(IMAGES, spectrum_every=1, smoothing=0.1)
    batch = load_probe_batch(dataset, 8)
    model(batch[0]).square().mean().backward()
    gradients = [(p.grad, p.grad.data_ptr(), p.grad.clone()) for p in model.parameters()]
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    line = Curvature(config, dataset, model, optimizer).measure(batch)
    assert line["about"]["randomness"] == "dropout fixed by seed 0"
    for p, (gradient, place, value) in zip(model.parameters(), gradients, strict=True):
        assert p.grad is gradient  # a captured graph writes into it
        assert p.grad.data_ptr() == place
        assert torch.equal(p.grad, value)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
    assert [module.training for module in model] == [True, False, True, True, True]
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]  # noqa: NPY002


@pytest.mark.slow
def test_the_current_batch_is_cut_to_the_size_of_the_probe(tmp_path):
    changes = {"micro_batch_size": 4, "spectrum_batch": 6, "spectrum_every": 99, "epochs": 1}
    train(IMAGES, tmp_path / "run", **changes)
    assert [line["probe"]["examples"] for line in lines(tmp_path / "run")] == [6, 6]
    assert [line["current"]["examples"] for line in lines(tmp_path / "run")] == [4, 4]


@pytest.mark.slow
def test_ghost_batches(tmp_path):
    train(IMAGES, tmp_path / "run", bn_batch=4, spectrum_every=99, epochs=1)
    assert lines(tmp_path / "run")[0]["probe"]["largest"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spectrum-every", "-1"], "--spectrum-every must be at least 0, got -1"),
        (["--spectrum-every", "5", "--fsdp"], "--spectrum-every needs unsharded weights"),
        (["--spectrum-batch", "0"], "--spectrum-batch must be at least 1, got 0"),
        (["--spectrum-products", "0"], "--spectrum-products must be at least 1, got 0"),
        (
            ["--spectrum-every", "5", "--spectrum-batch", "99999"],
            "--spectrum-batch must be at most 1437, the size of the training set; got 99999",
        ),
    ],
)
def test_refusals_are_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"neumann: {message}")
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_synchronized_batchnorm_is_refused_in_several_processes(monkeypatch):
    monkeypatch.setattr("neumann.lab.config._find_device", lambda name: torch.device("cuda"))
    config = TrainConfig(spectrum_every=5, sync_bn=True)
    with pytest.raises(UsageError, match="alone, which --sync-bn does not allow"):
        config.resolve(ranks=2)
    config.resolve(ranks=1)


class Once(torch.autograd.Function):
    """With a backward that autograd cannot see through, and no forward derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2


class Stubborn(nn.Linear):
    def forward(self, x):
        return Once.apply(super().forward(x.flatten(1)))


def test_a_model_without_second_derivatives_is_one_line():
    dataset, model = load("synthetic:1x8x8,4,64"), Stubborn(64, 4)
    optimizer = build_optimizer(Arm.parse("sgd"), model, steps_per_epoch=4)
    curvature = Curvature(dataclasses.replace(IMAGES, spectrum_every=1), dataset, model, optimizer)
    with pytest.raises(UsageError, match="--spectrum-every: neither double backward"):
        curvature.measure(load_probe_batch(dataset, 8))


@pytest.mark.parametrize(
    ("arm", "expected"),
    [("sgd", 0.9), ("sgd:momentum=0,nesterov=false", 0.0), ("adamw", 0.9), ("rmsprop", 0.9)],
)
def test_the_momentum_of_other_optimizers(arm, expected):
    optimizer = build_optimizer(Arm.parse(arm), nn.Linear(2, 2), steps_per_epoch=4)
    assert current_momentum(optimizer) == expected
    optimizer.param_groups[0].pop("momentum", None)
    optimizer.param_groups[0].pop("betas", None)
    assert current_momentum(optimizer) is None


def test_without_positive_curvature_nothing_is_implied():
    end = Extreme(-1.0, 0.1, 0.1, 0.1, True)
    about = Hessian(nn.Linear(2, 2), nn.functional.mse_loss, batch=(torch.ones(1, 2),) * 2).about
    found = extremes_as_dict(Extremes(end, end, 1, 1, 0.0, 1e-3, about))
    assert found["implied_lr"] is found["implied_momentum"] is None
    assert found["implied_lr_outside"] is None


def test_the_progress_bar_ignores_spectrum_lines():
    learner = Learner(dataclasses.replace(IMAGES, spectrum_every=5), Process())
    with progress.open_training_bar(
        learner, Console(file=io.StringIO(), force_terminal=True)
    ) as observe:
        observe({"kind": "spectrum", "step": 0, "epoch": 0.0})


def test_comparisons_measure_too():
    config = CompareConfig(spectrum_every=7).make_run_config("sgd", 0, None)
    assert config.spectrum_every == 7


def train_on_ranks(config, folder):
    process = Process(distributed.get_rank(), distributed.get_world_size())
    return Training(config, process).run(folder).accuracy


def test_two_processes_measure_the_same_probe_as_one(two, tmp_path):
    """At equal weights also its curvature; the current batch is the leading process's share."""
    config = dataclasses.replace(IMAGES, spectrum_every=99, epochs=1)
    train(config, tmp_path / "one")
    two.run(train_on_ranks, config, tmp_path / "two")
    alone, both = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in both] == [0, 8]
    assert both[0]["probe"]["largest"] == pytest.approx(alone[0]["probe"]["largest"], rel=1e-4)
    assert both[0]["current"]["examples"] == 4
    two.run(train_on_ranks, dataclasses.replace(config, spectrum_every=0), tmp_path / "plain")
    assert equal(kept(tmp_path / "two"), kept(tmp_path / "plain"))
