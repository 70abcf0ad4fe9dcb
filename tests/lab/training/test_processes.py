"""Several processes train as one: replicated or sharded, interrupted or not."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.training.batchnorm_layers import use_ghost_batches
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process, StopAgreement, run_on_leader
from neumann.lab.training.records import Diverged
from tests.support.processes import PROCESS_TIMEOUT
from tests.support.programs import run_ranks
from tests.support.texts import make_documents, write_documents

CHECKED = Path(__file__).parents[2] / "support" / "check_threads_end.py"
DIGITS = TrainConfig(opt="neumann:warmup_epochs=1", lr=0.1, epochs=2, log_every=5).resolve()
IMAGES = TrainConfig(
    data="synthetic:1x8x8,4,256",
    model="cnn",
    opt="neumann:warmup_epochs=1,lr=0.05",
    epochs=3,
    log_every=2,
).resolve()


def train(config, folder, **changes):
    """Train once, on this rank if there are several."""
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    process = Process(distributed.get_rank() if ranks > 1 else 0, ranks)
    training = Training(dataclasses.replace(config, **changes), process)
    return training.run(folder).accuracy


def losses(folder):
    return values(folder, "train_loss")


def values(folder, key):
    return [line[key] for line in read_metrics(folder) if key in line]


def weights(folder):
    model = Checkpoints(folder / "checkpoints").load_latest().payload["model"]
    return {name: value for name, value in model.items() if "running" not in name}


def furthest(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


@pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 8}, {"fsdp": True}])
def test_two_processes_train_as_one(two, tmp_path, changes):
    alone = train(DIGITS, tmp_path / "one")
    both = two.run(train, DIGITS, tmp_path / "two", **changes)
    assert both[0] == both[1] == pytest.approx(alone, abs=0.6)  # 2 of 360 examples
    for key in ("train_loss", "gradient_norm"):
        expected = values(tmp_path / "one", key)
        assert values(tmp_path / "two", key) == pytest.approx(expected, rel=1e-3)
    assert furthest(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-3


@pytest.mark.parametrize("opt", ["idealized:inner_steps=2", "cg"])
def test_inner_loops_of_two_processes_see_the_whole_batch(two, tmp_path, opt):
    changes = {"opt": opt, "lr": 0.1, "epochs": 1}
    train(DIGITS, tmp_path / "one", **changes)
    two.run(train, DIGITS, tmp_path / "two", **changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert furthest(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-3


@pytest.mark.parametrize("opt", ["normuon", "soap"])
def test_two_processes_train_hidden_matrices_and_the_rest_as_one(two, tmp_path, opt):
    changes = {"opt": opt, "lr": 1e-3, "epochs": 1}
    train(DIGITS, tmp_path / "one", **changes)
    two.run(train, DIGITS, tmp_path / "two", **changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.parametrize("opt", ["sgd", "adamw", "schedulefree", "lamb"])
def test_sharded_weights_train_with_other_optimizers(two, tmp_path, opt):
    changes = {"opt": opt, "lr": 1e-3, "epochs": 1}
    train(DIGITS, tmp_path / "one", **changes)
    two.run(train, DIGITS, tmp_path / "two", fsdp=True, **changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_batchnorm_of_two_processes_equals_ghost_batches(two, tmp_path):
    """Each of two processes normalizes its 32 examples, as ghost batches of 32 do in one."""
    train(IMAGES, tmp_path / "one", bn_batch=32)
    train(IMAGES, tmp_path / "whole")
    two.run(train, IMAGES, tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert losses(tmp_path / "two") != pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_sharding_a_model_with_lists_of_layers_and_shared_weights(two, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question " * 60)
    changes = {"data": f"text:{text}", "model": "gpt", "context": 32, "batch_size": 16}
    changes |= {"opt": "sgd", "epochs": 1}
    two.run(train, IMAGES, tmp_path / "copied", **changes)
    two.run(train, IMAGES, tmp_path / "sharded", fsdp=True, **changes)
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "copied"), rel=1e-3)


def test_two_processes_share_the_tokens_of_a_text(two, tmp_path):
    """The leader alone learns the vocabulary; the scores count every token of the text once."""
    text = write_documents(tmp_path / "pages.txt", make_documents(40))
    changes = {"data": f"text:{text}", "tokens": "bpe:300", "context": 16, "batch_size": 16}
    changes |= {"model": "gpt:width=32,depth=1,heads=2", "opt": "sgd", "epochs": 1}
    for name, options in (("copied", {}), ("sharded", {"fsdp": True})):
        two.run(train, IMAGES, tmp_path / name, **changes, **options)
    train(IMAGES, tmp_path / "alone", **changes)
    expected = read_summary(tmp_path / "alone")
    for name in ("copied", "sharded"):
        found = read_summary(tmp_path / name)
        for key in ("loss", "perplexity", "bits_per_byte"):
            assert found[key] == pytest.approx(expected[key], rel=1e-4)


def test_sharding_and_batchnorm(two, tmp_path):
    two.run(train, IMAGES, tmp_path / "copied")
    two.run(train, IMAGES, tmp_path / "sharded", fsdp=True)
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "copied"), rel=1e-3)


def test_ghost_batches_are_normalized_one_by_one():
    layer = nn.BatchNorm1d(3)
    other = nn.BatchNorm1d(3)
    inputs = torch.randn(12, 3)
    use_ghost_batches(nn.Sequential(layer), 4)
    expected = torch.cat([other(group) for group in inputs.split(4)])
    assert torch.equal(layer(inputs), expected)
    assert torch.equal(layer.running_mean, other.running_mean)
    assert layer.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(layer.eval()(inputs), other.eval()(inputs))


def interrupted_once(config, folder, **changes):
    """Stop in the middle of an epoch, then resume in the same processes."""
    process = Process(distributed.get_rank(), distributed.get_world_size())
    config = dataclasses.replace(config, resume="auto", **changes)
    seen = []

    def stop(line):
        seen.append(line)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # on the leading process alone

    with pytest.raises(BaseException, match="stopped by SIGTERM"):
        Training(config, process).run(folder, stop)
    return Training(config, process).run(folder).accuracy


@pytest.mark.parametrize("fsdp", [False, True])
def test_all_processes_stop_after_the_same_step_and_resume_with_the_same_bits(two, tmp_path, fsdp):
    two.run(train, IMAGES, tmp_path / "whole", fsdp=fsdp)
    two.run(interrupted_once, IMAGES, tmp_path / "run", fsdp=fsdp)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    ours, theirs = (
        Checkpoints(tmp_path / name / "checkpoints").load_latest().payload["model"]
        for name in ("run", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for key in ("accuracy", "loss"):
        assert read_summary(tmp_path / "run")[key] == read_summary(tmp_path / "whole")[key]


def diverged(folder):
    with pytest.raises(Diverged) as caught:
        train(DIGITS, folder, opt="sgd", lr=1e30)
    return caught.value.step


def test_a_divergence_ends_all_processes(two, tmp_path):
    steps = two.run(diverged, tmp_path / "run")
    assert steps[0] == steps[1]
    assert "diverged" in read_summary(tmp_path / "run")


def failing_lead():
    def action():
        raise UsageError("no room")

    with pytest.raises(UsageError, match="no room"):
        run_on_leader(Process(distributed.get_rank(), 2), action)


def test_a_failure_of_the_leader_is_raised_in_all_processes(two):
    two.run(failing_lead)


def stops(rank_asked):
    rank = distributed.get_rank()
    agreement = StopAgreement(Process(rank, 2))
    answers = [
        agreement.exchange(15 if rank == rank_asked and step >= 2 else None) for step in range(5)
    ]
    agreement.finish()
    return answers


def test_a_signal_to_one_process_stops_all_a_step_later(two):
    assert two.run(stops, 1) == [[None, None, None, 15, 15]] * 2


def test_refused(tmp_path):
    with pytest.raises(UsageError, match="--fsdp needs several processes"):
        train(DIGITS, tmp_path / "x", fsdp=True)
    with pytest.raises(UsageError, match="--bn-batch 48 does not divide the 64 examples"):
        train(IMAGES, tmp_path / "x", bn_batch=48)
    with pytest.raises(UsageError, match="--sync-bn needs a GPU"):
        TrainConfig(sync_bn=True, device="cpu").resolve()
    for opt in ("muon", "normuon", "soap"):
        with pytest.raises(UsageError, match=f"{opt} does not support sharded weights"):
            TrainConfig(opt=opt, fsdp=True).resolve()
    with pytest.raises(UsageError, match="cannot be combined"):
        TrainConfig(sync_bn=True, bn_batch=8).resolve()
    with pytest.raises(UsageError, match="--cuda-graph on needs a GPU"):
        TrainConfig(cuda_graph="on", device="cpu").resolve()
    with pytest.raises(UsageError, match=r"does not divide into 2 equal pieces"):
        Training(dataclasses.replace(DIGITS, batch_size=63), Process(0, 2))
    assert not (tmp_path / "x").exists()


def test_another_number_of_processes_is_refused(two, tmp_path):
    two.run(train, DIGITS, tmp_path / "run", epochs=1)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UsageError, match="has 2 processes; it cannot continue with 1"):
        train(DIGITS, tmp_path / "run", epochs=1, resume="auto")


@pytest.mark.distributed
def test_torchrun(tmp_path):
    """As a user starts it: a SIGTERM to torchrun reaches all, and the run can be resumed."""
    folder = tmp_path / "run"
    words = ["--opt", "neumann:warmup_epochs=1", "--lr", "0.2", "--epochs", "20"]
    words += ["--batch-size", "128", "--resume", "auto", "--output", str(folder)]
    checked = [str(CHECKED), "-m", "neumann", "train", *words]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", "2", *checked],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (folder / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PROCESS_TIMEOUT)
    assert output.count("--resume auto continues") == 1, output
    assert read_summary(folder) is None
    done = run_ranks(2, *checked)
    assert [rank.returncode for rank in done] == [0, 0], done
    assert "".join(rank.stdout for rank in done).count("accuracy") == 1
    assert read_summary(folder)["accuracy"] > 90
