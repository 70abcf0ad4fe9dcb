"""Evaluation: every example counts once, and the model is unchanged afterwards."""

import contextlib
import json

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

from neumann.lab.config import TrainConfig
from neumann.lab.data import Plan, load
from neumann.lab.storage.reading import RecordsError, read_metrics, read_summary
from neumann.lab.storage.run_files import read_run_files
from neumann.lab.training import evaluation
from neumann.lab.training.batchnorm_layers import (
    has_batchnorm,
    keep_statistics,
    use_ghost_batches,
)
from neumann.lab.training.evaluation import evaluate, evaluate_twice
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize("batch_size", [1, 7, 360, 10_000])
def test_the_score_does_not_depend_on_the_batches(digits, batch_size):
    model = network().eval()
    inputs, labels = next(iter(whole(digits)))
    with torch.no_grad():
        logits = model(inputs)
    score = evaluate(model, digits.test, batch_size, Process(), contextlib.nullcontext())
    assert score.examples == 360
    assert score.loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)
    assert score.accuracy == pytest.approx(100 * float((logits.argmax(1) == labels).float().mean()))


@pytest.mark.parametrize("batch_size", [7, 360])
def test_top5_counts_labels_among_the_five_largest_logits(digits, batch_size):
    model = network().eval()
    inputs, labels = next(iter(whole(digits)))
    with torch.no_grad():
        order = model(inputs).argsort(descending=True)
    expected = sum(int(label in best[:5]) for label, best in zip(labels, order, strict=True)) / 3.6
    arguments = (batch_size, Process(), contextlib.nullcontext())
    assert evaluate(model, digits.test, *arguments, top5=True).top5 == pytest.approx(expected)
    assert evaluate(model, digits.test, *arguments).top5 is None


@pytest.mark.parametrize("micro_batch", [None, 64])
def test_recalibration_sees_as_many_examples_in_small_pieces(digits, monkeypatch, micro_batch):
    seen = []

    def count(model, inputs, batches):
        seen.extend(len(next(inputs)) for _ in range(batches))

    monkeypatch.setattr(evaluation, "recalibrate_batchnorm", count)
    monkeypatch.setattr(evaluation, "RECALIBRATION_EXAMPLES", 600)
    config = TrainConfig(batch_size=256, micro_batch_size=micro_batch).resolve()
    evaluate_twice(network(), digits, config, Process(), contextlib.nullcontext)
    assert seen == ([256] * 3 if micro_batch is None else [64] * 10)


def test_two_processes_recalibrate_as_one(two):
    """Each normalizes its 32 examples, as ghost batches of 32 do in one process."""
    expected = score_recalibrated()
    assert two.run(score_recalibrated) == [pytest.approx(expected, rel=1e-6)] * 2


def score_recalibrated():
    process, model = Process(), network()
    if distributed.is_initialized():
        process = Process(distributed.get_rank(), distributed.get_world_size())
    else:
        use_ghost_batches(model, 32)
    config = TrainConfig(batch_size=64).resolve()
    _, score = evaluate_twice(model, load("digits"), config, process, contextlib.nullcontext)
    return score.loss


@pytest.mark.parametrize(("classes", "has_top5"), [(5, False), (6, True)])
def test_runs_with_more_than_five_classes_record_top5(tmp_path, classes, has_top5):
    config = TrainConfig(data=f"synthetic:4,{classes},64", opt="sgd", epochs=2).resolve()
    summary = Training(config, Process()).run(tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "epoch"]
    assert ["top5" in line for line in lines] == [has_top5] * 2
    assert ("top5" in read_summary(tmp_path / "run")) == has_top5
    assert (summary.top5 is not None) == has_top5
    assert read_run_files(tmp_path / "run").result == summary
    if has_top5:
        assert summary.accuracy <= summary.top5 == lines[-1]["top5"] <= 100


def test_a_summary_whose_top5_is_not_that_of_the_metrics_is_refused(tmp_path):
    config = TrainConfig(data="synthetic:4,6,64", opt="sgd", epochs=1).resolve()
    Training(config, Process()).run(tmp_path / "run")
    file = tmp_path / "run" / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "top5": 12.5}))
    with pytest.raises(RecordsError, match=r"top5 is 12\.5, but"):
        read_run_files(tmp_path / "run")


def whole(dataset):
    for pieces in dataset.test.batches(Plan(360, train=False)):
        yield pieces[0]


def test_evaluation_restores_the_mode_and_keeps_statistics(digits):
    model = network()
    before = model[1].running_mean.clone()
    evaluate(model, digits.test, 64, Process(), contextlib.nullcontext())
    assert model.training
    assert torch.equal(model[1].running_mean, before)


def test_keep_statistics_restores_them_even_after_an_exception():
    model = network()
    before = {name: b.clone() for name, b in model.named_buffers()}
    with keep_statistics(model):
        model(torch.randn(16, 64))
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    with pytest.raises(RuntimeError), keep_statistics(model):
        model(torch.randn(16, 63))
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_has_batchnorm():
    assert has_batchnorm(network())
    assert not has_batchnorm(nn.Linear(2, 2))
    assert not has_batchnorm(nn.BatchNorm1d(2, track_running_stats=False))
