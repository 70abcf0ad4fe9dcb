"""Runs on text: what they record, print and choose, and how they resume."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset, Plan, load
from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.studies.comparison import run_comparison
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.evaluation import MAX_LOGITS, Score, evaluate, evaluate_twice
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from tests.support.texts import make_documents, write_documents
from tests.support.torch_versions import needs_muon

MODEL = "gpt:width=32,depth=1,heads=2"


@pytest.fixture
def text(tmp_path):
    return write_documents(tmp_path / "pages.txt", make_documents(40))


def configure(text, **changes):
    given = {"data": f"text:{text}", "tokens": "bpe:300", "context": 16, "model": MODEL}
    given |= {"opt": "adamw", "lr": 0.01, "epochs": 2, "batch_size": 16, "device": "cpu"}
    return TrainConfig(**{**given, **changes}).resolve()


class Uniform(nn.Module):
    """Predicts every token with the same probability."""

    def __init__(self, classes):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(classes))

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


@pytest.mark.parametrize("tokens", ["chars", "bytes", "bpe:300"])
def test_bits_per_byte_count_the_bytes_that_were_predicted(text, tokens):
    data = load(f"text:{text}", tokens=tokens, context=16)
    config = TrainConfig(data=data.name)
    score, _ = evaluate_twice(
        Uniform(data.classes), data, config, Process(), lambda: torch.autocast("cpu", enabled=False)
    )
    labels = torch.cat([y for [(_, y)] in data.test.batches(Plan(1, train=False))])
    length = int(data.token_bytes[labels].sum())
    assert score.loss == pytest.approx(math.log(data.classes), rel=1e-6)
    assert score.perplexity == pytest.approx(data.classes, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(math.log2(data.classes) * labels.numel() / length)


def test_images_have_no_bits_per_byte():
    data = load("digits")
    plain = torch.autocast("cpu", enabled=False)
    score = evaluate(nn.Linear(64, 10), data.test, 512, Process(), plain)
    assert score.bits_per_byte is None
    assert score.as_fields().keys() == {"loss", "accuracy"}


def test_the_perplexity_of_a_huge_loss_is_infinite():
    assert Score(1e4, 0.0, 1, 1e4).perplexity == math.inf


def test_evaluation_takes_few_windows_at_once_where_logits_are_many(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "neumann.lab.training.evaluation.evaluate",
        lambda model, source, batch, *_: seen.append(batch),
    )
    digits = load("digits")
    data = Dataset("text:x", digits.train, digits.test, 16384, (256,), "text")
    evaluate_twice(nn.Linear(1, 1), data, TrainConfig(batch_size=1024), Process(), lambda: None)
    small = dataclasses.replace(data, classes=65)
    evaluate_twice(nn.Linear(1, 1), small, TrainConfig(batch_size=1024), Process(), lambda: None)
    assert seen == [MAX_LOGITS // (256 * 16384), 1024]


def test_a_run_records_loss_perplexity_and_bits_per_byte(text, tmp_path):
    folder = tmp_path / "run"
    summary = Training(configure(text, target=5.5), Process()).run(folder)
    written = read_summary(folder)
    last = [line for line in read_metrics(folder) if line["kind"] == "epoch"][-1]
    for record in (written, last):
        assert record["loss"] == summary.loss < math.log(300)
        assert record["perplexity"] == pytest.approx(math.exp(summary.loss))
        assert 0 < record["bits_per_byte"] == summary.bits_per_byte < summary.loss / math.log(2)
    # The target is a loss: a run reaches it from above.
    losses = [line["loss"] for line in read_metrics(folder) if line["kind"] == "epoch"]
    reached = next((n for n, loss in enumerate(losses, start=1) if loss <= 5.5), None)
    assert summary.epochs_to_target == reached


def test_a_target_below_the_loss_is_not_reached(text, tmp_path):
    summary = Training(configure(text, target=0.01, epochs=1), Process()).run(tmp_path / "run")
    assert summary.steps_to_target is None


@pytest.mark.parametrize(
    "opt", ["adamw", pytest.param("muon", marks=needs_muon), "normuon", "soap"]
)
def test_a_run_resumes_with_the_same_bits(text, tmp_path, opt):
    folder = tmp_path / "run"
    whole = Training(configure(text, opt=opt, clip_grad=1.0), Process()).run(folder)
    (folder / "summary.json").unlink()
    checkpoints = Checkpoints(folder / "checkpoints")
    for file in (folder / "checkpoints").glob(f"*{checkpoints.list_steps()[-1]}*"):
        file.unlink()
    training = Training(configure(text, opt=opt, clip_grad=1.0, resume="auto"), Process())
    again = training.run(folder)
    seconds = {"seconds": 0.0, "compile_seconds": 0.0}
    assert dataclasses.replace(again, **seconds) == dataclasses.replace(whole, **seconds)


def test_held_out_runs_use_the_validation_set(text, tmp_path):
    learner = Learner(configure(text, held_out=True), Process())
    data = load(f"text:{text}", tokens="bpe:300", context=16)
    assert learner.dataset.test.tokens.equal(data.validation.tokens)
    assert learner.dataset.train.tokens.equal(data.train.tokens)


FLAGS = ["--tokens", "bytes", "--context", "16", "--model", MODEL, "--batch-size", "16"]
FLAGS += ["--epochs", "1", "--device", "cpu"]


def test_what_train_prints(text, tmp_path, capsys):
    words = ["train", "--data", f"text:{text}", *FLAGS, "--opt", "adamw", "--lr", "0.01"]
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    out, log = capsys.readouterr()
    found = read_summary(tmp_path / "run")
    assert out.startswith(
        f"loss {found['loss']:.4f} nats per token, perplexity {found['perplexity']:.2f}, "
        f"{found['bits_per_byte']:.4f} bits per byte after"
    )
    assert f"evaluated loss {found['loss']:.4f} nats per token" in log


@pytest.mark.slow
def test_a_sweep_chooses_the_lowest_loss(text, tmp_path, capsys):
    words = ["sweep", "--data", f"text:{text}", *FLAGS, "--arms", "adamw", "--seeds", "2"]
    assert main([*words, "--lr", "1e-5:1e-2:2", "--output", str(tmp_path / "sweep")]) == 0
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["winners"] == {"adamw": 0.01}
    out = capsys.readouterr().out
    assert "* chosen, by the mean loss on held-out data" in out
    assert "nats per token" in out
    assert "bits per byte" in out
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "loss on held-out data, nats per token" in page


# ---------------------------------------------------------------------- the text changes


def test_a_run_is_not_continued_on_another_text(text, tmp_path):
    config = configure(text, tokens="bytes", output=tmp_path / "run", resume="auto")
    Training(config, Process()).run(config.output)
    (config.output / "summary.json").unlink()
    write_documents(text, make_documents(60))
    with pytest.raises(UsageError, match="holds a run on another text: the files of --data have"):
        Training(config, Process()).run(config.output)
    write_documents(text, make_documents(40))
    Training(config, Process()).run(config.output)


@pytest.mark.slow
def test_a_comparison_does_not_mix_texts(text, tmp_path):
    given = {"data": f"text:{text}", "tokens": "bytes", "context": 16, "model": MODEL}
    given |= {"arms": ("adamw", "sgd"), "epochs": 1, "batch_size": 16, "device": "cpu"}
    before = run_comparison(CompareConfig(**given, seeds=1), tmp_path / "study")
    kept = text.read_bytes()
    write_documents(text, make_documents(60))
    assert run_comparison(CompareConfig(**given, seeds=1), tmp_path / "study") == before
    with pytest.raises(UsageError, match=r"adamw.*holds a run on another text"):
        run_comparison(CompareConfig(**given, seeds=2), tmp_path / "study")
    text.write_bytes(kept)
    found = run_comparison(CompareConfig(**given, seeds=2), tmp_path / "study")
    assert [row.score.n for row in found.rows] == [2, 2]


# ---------------------------------------------------------------------- what is found early


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt:wdth=3"}, "unknown gpt option 'wdth'; did you mean width"),
        ({"model": "mlp"}, "model mlp reads vectors or images, but .* is a text; models that fit"),
    ],
)
def test_a_wrong_model_is_found_before_the_text_is_tokenized(text, changes, message):
    with pytest.raises(UsageError, match=message):
        Training(configure(text, **changes), Process())
    assert [file.name for file in text.parent.iterdir()] == [text.name]


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_of_a_text_is_a_loss(text, target):
    with pytest.raises(UsageError, match="--target must be a loss in nats per token"):
        configure(text, target=target)
    assert configure(text, target=3.5).target == 3.5


def test_a_target_that_needs_no_training_is_refused(text):
    """95 is an accuracy; as a loss it would be reached at the first evaluation."""
    with pytest.raises(UsageError, match=r"--target 95 .* among 256 tokens .* 5\.55 nats"):
        Training(configure(text, tokens="bytes", target=95), Process())


def test_the_command_says_whether_the_target_was_reached(text, tmp_path, capsys):
    words = [
        "train",
        "--data",
        f"text:{text}",
        "--tokens",
        "bytes",
        "--context",
        "16",
        "--model",
        MODEL,
    ]
    words += ["--opt", "adamw", "--epochs", "1", "--batch-size", "16", "--device", "cpu"]
    assert main([*words, "--target", "5.5", "--output", str(tmp_path / "easy")]) == 0
    assert "the target of 5.5 nats per token was reached after " in capsys.readouterr().out
    assert main([*words, "--target", "0.1", "--output", str(tmp_path / "hard")]) == 0
    assert "the target of 0.1 nats per token was not reached" in capsys.readouterr().out
