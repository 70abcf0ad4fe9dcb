"""On a GPU: captured steps, no waiting for the device, compilation, SyncBatchNorm."""

import dataclasses
import os
import signal

import pytest
import torch
from torch import distributed

from neumann.lab.config import TrainConfig
from neumann.lab.storage.reading import read_metrics
from neumann.lab.training.gradients import CapturedGradientComputer
from neumann.lab.training.inputs import plan_epoch
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.running_loss import RunningLoss
from neumann.lab.training.signals import Interrupted
from tests.support.process_group import ProcessGroup

pytestmark = pytest.mark.gpu

CONFIG = TrainConfig(
    data="synthetic:3x32x32,10,2048",
    flip=True,
    shift=4,
    model="cnn",
    opt="neumann:warmup_epochs=1",
    lr=0.05,
    batch_size=128,
    epochs=3,
    log_every=4,
    device="cuda",
)


def trained(folder, **changes):
    training = Training(dataclasses.replace(CONFIG, **changes).resolve(), Process())
    return training, training.run(folder)


def losses(folder):
    return [line["train_loss"] for line in read_metrics(folder) if "train_loss" in line]


@pytest.mark.parametrize(
    "opt", ["neumann:warmup_epochs=1", "sgd", "adamw:lr=1e-3", "idealized:inner_steps=2,lr=0.02"]
)
def test_a_captured_step_equals_an_ordinary_one(tmp_path, opt):
    common = {"opt": opt, "amp": "off", "compile": "off"}
    training, _ = trained(tmp_path / "captured", **common)
    assert isinstance(training.learner.gradients, CapturedGradientComputer)
    trained(tmp_path / "plain", cuda_graph="off", **common)
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_conjugate_gradients_train_compiled_in_bfloat16(tmp_path, curvature):
    opt = f"cg:curvature={curvature},damping=10,lr=0.3"  # with 1, the Hessian form climbs
    training, summary = trained(tmp_path, opt=opt)
    assert not isinstance(training.learner.gradients, CapturedGradientComputer)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert summary.products >= summary.steps


def test_a_captured_step_clips_its_gradient(tmp_path):
    common = {"clip_grad": 0.05, "amp": "off", "compile": "off"}
    trained(tmp_path / "captured", **common)
    trained(tmp_path / "plain", cuda_graph="off", **common)
    trained(tmp_path / "free", **{**common, "clip_grad": None})
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)
    assert losses(tmp_path / "captured")[-1] > losses(tmp_path / "free")[-1]


def test_a_clipped_recurrent_model_trains_compiled_and_captured(tmp_path):
    """As in the paper's negative result, section 4.4."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question " * 400)
    common = {"data": f"text:{text}", "model": "gru", "context": 32, "clip_grad": 1.0}
    common |= {"flip": None, "shift": None}
    trained(tmp_path / "fast", **common)
    trained(tmp_path / "plain", amp="off", compile="off", cuda_graph="off", **common)
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "plain"), rel=5e-2)


@pytest.mark.parametrize("fast", [False, True])
def test_curvature_is_measured_between_captured_steps(tmp_path, fast):
    """In float32 without TF32, whatever the training uses, and without effect on it."""
    common = {} if fast else {"amp": "off", "compile": "off"}
    trained(tmp_path / "measured", spectrum_every=20, spectrum_batch=64, **common)
    trained(tmp_path / "plain", **common)
    lines = read_metrics(tmp_path / "measured")
    spectra = [line for line in lines if line["kind"] == "spectrum"]
    assert [line["step"] for line in spectra] == [0, 20, 40, 48]
    for line in spectra:
        assert line["probe"]["largest_converged"]
        assert line["probe"]["noise"] < 1e-3 * line["probe"]["largest"]
    measured = [line["train_loss"] for line in lines if "train_loss" in line]
    assert measured == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)


def test_compiled_in_bfloat16(tmp_path):
    _, summary = trained(tmp_path / "fast")
    trained(tmp_path / "plain", amp="off", compile="off", cuda_graph="off")
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "plain"), rel=5e-2)
    assert summary.compile_seconds > 0


@pytest.mark.parametrize("model", ["cnn", "resnet9"])
def test_runs_share_one_compilation(tmp_path, model):
    counters = torch._dynamo.utils.counters
    trained(tmp_path / "first", model=model, epochs=1)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled >= 1
    trained(tmp_path / "second", model=model, epochs=1, seed=1, opt="sgd")
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("opt", ["neumann:warmup_epochs=1", "sgd", "adamw:lr=1e-3"])
def test_a_step_does_not_wait_for_the_device(opt):
    config, process = dataclasses.replace(CONFIG, opt=opt).resolve(), Process()
    learner = Learner(config, process)
    mean = RunningLoss(learner.device, process)
    batches = learner.dataset.train.batches(plan_epoch(config, process, 0))
    for _ in range(5):
        mean.add(learner.take_step(next(batches)), learner.step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            mean.add(learner.take_step(next(batches)), learner.step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mean.find_first_bad() is None


def test_a_finished_run_frees_its_graph(tmp_path):
    """Many runs share a process, and a graph holds all that a pass needs."""
    trained(tmp_path / "first", batch_size=2048, epochs=5, model="resnet9")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    kept = [trained(tmp_path / f"{n}", batch_size=2048, epochs=5, model="resnet9") for n in "23"]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1.2 * before + 2**28
    assert len(kept) == 2


def test_ghost_batches_compiled(tmp_path):
    trained(tmp_path / "fast", bn_batch=32)
    trained(tmp_path / "plain", bn_batch=32, amp="off", compile="off", cuda_graph="off")
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "plain"), rel=5e-2)


def test_gradient_accumulation(tmp_path):
    trained(tmp_path / "whole", bn_batch=32, amp="off", compile="off")
    trained(tmp_path / "pieces", micro_batch_size=32, amp="off", compile="off")
    assert losses(tmp_path / "pieces") == pytest.approx(losses(tmp_path / "whole"), rel=2e-2)


def test_interrupted_and_resumed(tmp_path):
    trained(tmp_path / "whole", amp="off", compile="off")
    config = dataclasses.replace(CONFIG, resume="auto", amp="off", compile="off").resolve()
    seen = []

    def stop(line):
        seen.append(line)
        if len(seen) == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        Training(config, Process()).run(tmp_path / "run", stop)
    Training(config, Process()).run(tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=2e-2)


def train_synchronized(folder):
    process = Process(distributed.get_rank(), 2, 0)  # both on the one GPU
    config = dataclasses.replace(
        CONFIG, sync_bn=True, amp="off", compile="off", cuda_graph="off"
    ).resolve()
    return Training(config, process).run(folder).train_loss


def test_synchronized_batchnorm_equals_that_of_one_process(tmp_path):
    trained(tmp_path / "one", amp="off", compile="off", cuda_graph="off")
    ranks = ProcessGroup(2, "gloo")  # NCCL takes no two ranks on one GPU
    try:
        ranks.run(train_synchronized, tmp_path / "two")
    finally:
        ranks.stop()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-2)
