"""Lightning with EvaluationWeights matches a plain loop bit for bit."""

import copy
import importlib
import signal
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from neumann.integrations.lightning import EvaluationWeights
from tests.support.lightning_runs import (
    IGNORED_WARNINGS,
    Module,
    RecordingMixin,
    assert_matches_plain_loop,
    lightning,
    load_saved_weights,
    make_trainer,
)
from tests.support.plain_loop import EPOCH, OPTIONS, equal, loader, run_plain_loop, weights

pytestmark = IGNORED_WARNINGS


@pytest.fixture
def _interrupts():
    """Restore pytest's handler: Lightning ignores further interrupts after the first."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    "options",
    [
        {},  # a sanity check, and a validation after each epoch
        {"check_val_every_n_epoch": 2},
        {"val_check_interval": 2},  # in the middle of an epoch
        {"val_check_interval": 1, "accumulate_grad_batches": 2},  # in the middle of a gradient
    ],
    ids=str,
)
def test_validation_uses_the_evaluation_weights_and_training_is_unaffected(options):
    module = Module()
    make_trainer(**options).fit(module, loader(), loader())
    accumulate = options.get("accumulate_grad_batches", 1)
    assert_matches_plain_loop(module, 3 * EPOCH // accumulate, accumulate)
    _, evaluated = run_plain_loop(3 * EPOCH // accumulate, accumulate)
    assert equal(weights(module), evaluated[-1])  # fit leaves the evaluation weights


def test_switching_twice_equals_switching_once():
    """A second callback, and a module that calls train() and eval() itself, change no bit."""

    class Eager(Module):
        def on_validation_start(self):
            self.optimizers().eval()

        def on_validation_end(self):
            self.optimizers().train()
            self.optimizers().eval()

        def on_train_batch_start(self, batch, batch_idx):
            self.optimizers().train()

        def on_train_epoch_end(self):
            self.optimizers().train()

    module = Eager()
    make_trainer(EvaluationWeights(), val_check_interval=2).fit(module, loader(), loader())
    assert_matches_plain_loop(module)
    assert equal(weights(module), run_plain_loop(3 * EPOCH)[1][-1])


def test_without_the_callback_lightning_validates_displaced_weights():
    """Why the callback exists. This test fails if Lightning learns to switch by itself."""
    module = Module()
    trainer = make_trainer()
    trainer.callbacks.clear()
    trainer.fit(module, loader(), loader())
    trained, _ = run_plain_loop(3 * EPOCH)
    assert all(equal(found, trained[step]) for step, found in module.evaluated)


def test_evaluating_without_training_needs_no_optimizer():
    module = Module()
    for evaluate in (make_trainer().validate, make_trainer().test):
        evaluate(module, loader(), verbose=False)
    make_trainer().predict(module, loader())
    assert all(equal(found, weights(module)) for _, found in module.evaluated)


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("exception", [KeyError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["validation_step", "training_step"])
def test_an_exception_leaves_the_evaluation_weights(tmp_path, exception, where):
    trained, evaluated = run_plain_loop(3 * EPOCH)

    class Failing(Module):
        def fail(self, hook, *arguments):
            if hook == where and self.trainer.global_step == 12:
                raise exception
            return getattr(super(), hook)(*arguments)

        def validation_step(self, batch, batch_idx):
            return self.fail("validation_step", batch, batch_idx)

        def training_step(self, batch):
            return self.fail("training_step", batch)

    last = lightning.callbacks.ModelCheckpoint(
        tmp_path, save_last=True, save_on_exception=True, save_weights_only=True
    )
    trainer, module = make_trainer(last), Failing()
    with pytest.raises(SystemExit if exception is KeyboardInterrupt else exception):
        trainer.fit(module, loader(), loader())
    assert equal(weights(module), evaluated[12])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    resumed = Module()
    resumed.load_state_dict(saved["state_dict"])
    optimizer = resumed.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert equal(weights(resumed), evaluated[12])
    optimizer.train()
    assert equal(weights(resumed), trained[12])


def test_early_stopping_leaves_the_evaluation_weights():
    _, evaluated = run_plain_loop(3 * EPOCH)
    module = Module()
    make_trainer(lightning.callbacks.EarlyStopping("loss", patience=1), max_epochs=9).fit(
        module, loader(), loader()
    )
    assert module.trained[-1][0] == 2 * EPOCH
    assert equal(weights(module), evaluated[2 * EPOCH])


class Several(lightning.LightningModule):
    """Three optimizers, stepped by hand: Neumann, Neumann with tied and frozen weights, and SGD."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first = nn.Linear(5, 3)
        self.tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.tied[1].weight = self.tied[0].weight
        self.tied[0].bias.requires_grad_(False)
        self.last = nn.Linear(3, 3)
        self.evaluated = []

    def forward(self, x):
        return self.last(self.tied[1](self.tied[0](self.first(x)).tanh()))

    def training_step(self, batch):
        x, y = batch
        self.manual_backward(cross_entropy(self(x), y))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(copy.deepcopy(self.state_dict()))

    def configure_optimizers(self):
        return [
            Neumann(self.first.parameters(), **OPTIONS),
            Neumann(self.tied.named_parameters(), **OPTIONS),
            torch.optim.SGD(self.last.parameters(), lr=0.1, momentum=0.9),
        ]


def test_several_optimizers_in_manual_optimization(tmp_path):
    class Save(lightning.callbacks.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "between.ckpt")

    plain = Several()
    optimizers = plain.configure_optimizers()
    for x, y in [*loader(), *loader()]:
        cross_entropy(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers[:2]:
        optimizer.eval()
    expected = plain.state_dict()

    module = Several()
    make_trainer(Save(), max_epochs=2).fit(module, loader(), loader())
    saved = torch.load(tmp_path / "between.ckpt", weights_only=True)
    for found in (module.evaluated[-1], module.state_dict(), saved["state_dict"]):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    for before, after in zip(optimizers, saved["optimizer_states"], strict=True):
        loaded = module.configure_optimizers()[optimizers.index(before)]
        loaded.load_state_dict(after)
        assert all(
            "training" not in group or not group["training"] for group in loaded.param_groups
        )


def test_the_callback_works_with_pytorch_lightning(tmp_path):
    package = pytest.importorskip("pytorch_lightning")

    class Other(RecordingMixin, package.LightningModule):
        pass

    every = package.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10)
    module = Other()
    make_trainer(every, package=package).fit(module, loader(), loader())
    assert_matches_plain_loop(module)
    assert equal(load_saved_weights(tmp_path / "step=10.ckpt"), run_plain_loop(10)[1][10])


def test_a_missing_package_names_the_extra_to_install(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "neumann.integrations.lightning")
    with pytest.raises(ImportError, match=r'pip install "\.\[lightning\]"'):
        importlib.import_module("neumann.integrations.lightning")


@pytest.mark.filterwarnings("ignore:the optimizer.s SGD warm-up")  # the run is short
def test_the_example_runs(example, capsys):
    example("lightning_digits").main(epochs=7)  # past the warm-up
    assert "test accuracy" in capsys.readouterr().out
