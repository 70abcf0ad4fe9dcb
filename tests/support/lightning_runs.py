"""A Lightning module that records its weights, to compare with a plain loop."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from neumann import Neumann
from tests.support.plain_loop import EPOCH, OPTIONS, equal, network, run_plain_loop, weights

lightning = pytest.importorskip("lightning.pytorch")

from neumann.integrations.lightning import EvaluationWeights  # noqa: E402

IGNORED_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*treespec, LeafSpec.* is deprecated",
        "The '.*_dataloader' does not have many workers",
        "You defined a `validation_step` but have no `val_dataloader`",
        "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    )
]


class RecordingMixin:
    """Records step and weights at every evaluation and after every batch."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.evaluated, self.trained = [], []

    def training_step(self, batch):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # Called after the callbacks, which may have switched for a checkpoint.
        self.trained.append((self.trainer.global_step, self.optimizers().training, weights(self)))

    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(float(batch_idx)))
        self.evaluated.append((self.trainer.global_step, weights(self)))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.evaluated.append((self.trainer.global_step, weights(self)))
        return batch_idx

    def configure_optimizers(self):
        return Neumann(self.named_parameters(), **OPTIONS)


class Module(RecordingMixin, lightning.LightningModule):
    pass


def make_trainer(*callbacks, package=lightning, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_epochs": 3, "enable_checkpointing": False} | options
    options["enable_checkpointing"] |= any(hasattr(c, "save_weights_only") for c in callbacks)
    return package.Trainer(callbacks=[EvaluationWeights(), *callbacks], **quiet, **options)


def assert_matches_plain_loop(module, steps=3 * EPOCH, accumulate=1):
    trained, evaluated = run_plain_loop(steps, accumulate)
    assert module.evaluated
    assert module.trained
    assert all(equal(found, evaluated[step]) for step, found in module.evaluated)
    for step, training, found in module.trained:
        assert equal(found, trained[step] if training else evaluated[step])


def load_saved_weights(path):
    state_dict = torch.load(path, weights_only=True)["state_dict"]
    return [state_dict[f"network.{name}"] for name, _ in network().named_parameters()]
