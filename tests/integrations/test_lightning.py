"""Lightning with EvaluationWeights: against a plain loop, bit for bit, in everything it saves."""

import copy
import importlib
import signal
import sys

import pytest
import torch
from plain import EPOCH, OPTIONS, equal, loader, network, plain_run, weights
from torch import nn
from torch.nn.functional import cross_entropy

from neumann import Neumann

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint  # noqa: E402

from neumann.integrations.lightning import EvaluationWeights  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*treespec, LeafSpec.* is deprecated",
        "The '.*_dataloader' does not have many workers",
        "You defined a `validation_step` but have no `val_dataloader`",
        "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    )
]


class Noting:
    """Notes the weights at every evaluation and after every batch, by the number of the step."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.shown, self.trained = [], []

    def training_step(self, batch):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # After the callbacks, which may have switched for a checkpoint.
        self.trained.append((self.trainer.global_step, self.optimizers().training, weights(self)))

    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(float(batch_idx)))
        self.shown.append((self.trainer.global_step, weights(self)))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.shown.append((self.trainer.global_step, weights(self)))
        return batch_idx

    def configure_optimizers(self):
        return Neumann(self.named_parameters(), **OPTIONS)


class Module(Noting, lightning.LightningModule):
    pass


def trainer_with(*callbacks, package=lightning, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_epochs": 3, "enable_checkpointing": False} | options
    options["enable_checkpointing"] |= any(hasattr(c, "save_weights_only") for c in callbacks)
    return package.Trainer(callbacks=[EvaluationWeights(), *callbacks], **quiet, **options)


def assert_is_the_plain_run(module, steps=3 * EPOCH, accumulate=1):
    trained, shown = plain_run(steps, accumulate)
    assert module.shown
    assert module.trained
    assert all(equal(found, shown[step]) for step, found in module.shown)
    for step, training, found in module.trained:
        assert equal(found, trained[step] if training else shown[step])


@pytest.fixture
def _interrupts():
    """Lightning ignores further ones once it has seen one; pytest wants to be interruptible."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def saved_weights(path):
    state_dict = torch.load(path, weights_only=True)["state_dict"]
    return [state_dict[f"network.{name}"] for name, _ in network().named_parameters()]


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
def test_validation_sees_the_corrected_weights_and_training_never_notices(options):
    module = Module()
    trainer_with(**options).fit(module, loader(), loader())
    accumulate = options.get("accumulate_grad_batches", 1)
    assert_is_the_plain_run(module, 3 * EPOCH // accumulate, accumulate)
    _, shown = plain_run(3 * EPOCH // accumulate, accumulate)
    assert equal(weights(module), shown[-1])  # fit leaves what is to be shipped


def test_switching_twice_is_switching_once():
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
    trainer_with(EvaluationWeights(), val_check_interval=2).fit(module, loader(), loader())
    assert_is_the_plain_run(module)
    assert equal(weights(module), plain_run(3 * EPOCH)[1][-1])


def test_without_the_callback_lightning_validates_displaced_weights():
    """What the callback is for; should Lightning learn to switch, this test says so."""
    module = Module()
    trainer = trainer_with()
    trainer.callbacks.clear()
    trainer.fit(module, loader(), loader())
    trained, _ = plain_run(3 * EPOCH)
    assert all(equal(found, trained[step]) for step, found in module.shown)


@pytest.mark.parametrize("where", ["validation end", "epoch end", "epoch end, no validation"])
def test_a_checkpoint_after_evaluation_ships_and_resumes_exactly(tmp_path, where):
    trained, shown = plain_run(3 * EPOCH)
    validation = None if "no validation" in where else loader()
    checkpoint = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, save_on_train_epoch_end=where != "validation end"
    )
    trainer_with(checkpoint, max_epochs=2).fit(Module(), loader(), validation)
    path = tmp_path / f"step={EPOCH}.ckpt"
    assert equal(saved_weights(path), shown[EPOCH])

    resumed = Module()
    trainer = trainer_with()
    trainer.fit(resumed, loader(), validation, ckpt_path=path)
    if validation is not None:
        assert_is_the_plain_run(resumed)
    assert resumed.trained[-1][0] == 3 * EPOCH
    assert equal(weights(resumed), shown[3 * EPOCH])
    trainer.optimizers[0].train()
    assert equal(weights(resumed), trained[3 * EPOCH])


class Resumable:
    """Batches that know how far they are, which Lightning needs to resume within an epoch."""

    def __init__(self):
        self.batches, self.position = list(loader()), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for position in range(self.position % len(self), len(self)):
            self.position = position + 1
            yield self.batches[position]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("step", [2, 4, 9, 15])  # warm-up, reset, iterate, just before a reset
def test_a_checkpoint_between_batches_ships_and_resumes_exactly(tmp_path, step):
    _, shown = plain_run(3 * EPOCH)
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1)
    module = Module()
    trainer_with(every).fit(module, Resumable())
    assert all(training for _, training, _ in module.trained)  # the live model was not touched
    path = tmp_path / f"step={step}.ckpt"
    assert equal(saved_weights(path), shown[step])

    resumed = Module()
    trainer_with().fit(resumed, Resumable(), ckpt_path=path)
    assert resumed.trained[0][0] == step + 1
    resumed.shown.append((step, shown[step]))
    assert_is_the_plain_run(resumed)


def test_a_checkpoint_may_be_written_between_forward_and_backward(tmp_path):
    _, shown = plain_run(3 * EPOCH)

    class Saving(Module):
        def training_step(self, batch):
            loss = super().training_step(batch)
            if self.trainer.global_step == 10:
                self.trainer.save_checkpoint(tmp_path / "10.ckpt")
            return loss

    module = Saving()
    trainer_with().fit(module, loader(), loader())
    assert equal(saved_weights(tmp_path / "10.ckpt"), shown[10])
    assert_is_the_plain_run(module)


@pytest.mark.parametrize("trigger", [{"every_n_train_steps": 5}, {"every_n_epochs": 1}], ids=str)
def test_a_checkpoint_of_the_weights_alone_is_of_the_right_ones(tmp_path, trigger):
    _, shown = plain_run(3 * EPOCH)
    only = ModelCheckpoint(tmp_path, "{step}", save_weights_only=True, save_top_k=-1, **trigger)
    module = Module()
    trainer_with(only).fit(module, loader())
    found = {int(path.stem.split("=")[1]): saved_weights(path) for path in tmp_path.iterdir()}
    assert set(found) == ({5, 10, 15} if "every_n_train_steps" in trigger else {6, 12, 18})
    assert all(equal(weights, shown[step]) for step, weights in found.items())
    module.shown = list(found.items())
    assert_is_the_plain_run(module)


def test_after_fit_everything_is_of_the_corrected_weights(tmp_path):
    _, shown = plain_run(3 * EPOCH)
    best = ModelCheckpoint(tmp_path, "best", monitor="loss")
    trainer, module = trainer_with(best), Module()
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert equal(saved_weights(tmp_path / "end.ckpt"), shown[-1])
    assert equal(saved_weights(tmp_path / "weights.ckpt"), shown[-1])

    module.shown.clear()
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(module, loader())
        trainer.optimizers[0].train()  # by hand; the next one asks for eval() itself
    trainer.optimizers[0].eval()
    assert len(module.shown) == 3 * EPOCH
    assert all(equal(found, shown[-1]) for _, found in module.shown)

    module.shown.clear()
    trainer.test(module, loader(), ckpt_path="best", verbose=False)
    assert all(equal(found, shown[EPOCH]) for _, found in module.shown)  # corrected once

    resumed = Module()
    trainer_with(max_epochs=4).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "end.ckpt")
    assert_is_the_plain_run(resumed, 4 * EPOCH)


def test_evaluating_without_training_needs_no_optimizer():
    module = Module()
    for evaluate in (trainer_with().validate, trainer_with().test):
        evaluate(module, loader(), verbose=False)
    trainer_with().predict(module, loader())
    assert all(equal(found, weights(module)) for _, found in module.shown)


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("exception", [KeyError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["validation_step", "training_step"])
def test_an_exception_leaves_the_corrected_weights(tmp_path, exception, where):
    trained, shown = plain_run(3 * EPOCH)

    class Failing(Module):
        def fail(self, hook, *arguments):
            if hook == where and self.trainer.global_step == 12:
                raise exception
            return getattr(super(), hook)(*arguments)

        def validation_step(self, batch, batch_idx):
            return self.fail("validation_step", batch, batch_idx)

        def training_step(self, batch):
            return self.fail("training_step", batch)

    last = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True, save_weights_only=True)
    trainer, module = trainer_with(last), Failing()
    with pytest.raises(SystemExit if exception is KeyboardInterrupt else exception):
        trainer.fit(module, loader(), loader())
    assert equal(weights(module), shown[12])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    resumed = Module()
    resumed.load_state_dict(saved["state_dict"])
    optimizer = resumed.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert equal(weights(resumed), shown[12])
    optimizer.train()
    assert equal(weights(resumed), trained[12])


def test_early_stopping_stops_with_the_corrected_weights():
    _, shown = plain_run(3 * EPOCH)
    module = Module()
    trainer_with(EarlyStopping("loss", patience=1), max_epochs=9).fit(module, loader(), loader())
    assert module.trained[-1][0] == 2 * EPOCH
    assert equal(weights(module), shown[2 * EPOCH])


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
        self.shown = []

    def forward(self, x):
        return self.last(self.tied[1](self.tied[0](self.first(x)).tanh()))

    def training_step(self, batch):
        x, y = batch
        self.manual_backward(cross_entropy(self(x), y))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch, batch_idx):
        self.shown.append(copy.deepcopy(self.state_dict()))

    def configure_optimizers(self):
        return [
            Neumann(self.first.parameters(), **OPTIONS),
            Neumann(self.tied.named_parameters(), **OPTIONS),
            torch.optim.SGD(self.last.parameters(), lr=0.1, momentum=0.9),
        ]


def test_several_optimizers_in_manual_optimization(tmp_path):
    class Save(Callback):
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
    trainer_with(Save(), max_epochs=2).fit(module, loader(), loader())
    saved = torch.load(tmp_path / "between.ckpt", weights_only=True)
    for found in (module.shown[-1], module.state_dict(), saved["state_dict"]):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    for before, after in zip(optimizers, saved["optimizer_states"], strict=True):
        loaded = module.configure_optimizers()[optimizers.index(before)]
        loaded.load_state_dict(after)
        assert all(
            "training" not in group or not group["training"] for group in loaded.param_groups
        )


def test_weights_that_are_not_the_parameters_are_left_alone(tmp_path):
    """As a strategy gathers them: such a checkpoint stays one of w, in training mode."""
    trained, _ = plain_run(3 * EPOCH)

    class Gather(Module):
        def state_dict(self, *arguments, **options):
            return {k: v.clone() for k, v in super().state_dict(*arguments, **options).items()}

    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10)
    trainer_with(every).fit(Gather(), loader())
    assert equal(saved_weights(tmp_path / "step=10.ckpt"), trained[10])
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    assert all(group["training"] for group in saved["optimizer_states"][0]["param_groups"])


def test_the_callback_serves_pytorch_lightning_too(tmp_path):
    package = pytest.importorskip("pytorch_lightning")

    class Other(Noting, package.LightningModule):
        pass

    every = package.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10)
    module = Other()
    trainer_with(every, package=package).fit(module, loader(), loader())
    assert_is_the_plain_run(module)
    assert equal(saved_weights(tmp_path / "step=10.ckpt"), plain_run(10)[1][10])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "neumann.integrations.lightning")
    with pytest.raises(ImportError, match=r"pip install neumann-optimizer\[lightning\]"):
        importlib.import_module("neumann.integrations.lightning")


def test_the_example_runs(example, capsys):
    example("lightning_digits").main(epochs=7)  # past the warm-up
    assert "test accuracy" in capsys.readouterr().out
