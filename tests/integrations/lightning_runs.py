"""A Lightning module that notes its weights, to be held against a plain loop."""

import pytest
import torch
from plain import EPOCH, OPTIONS, equal, network, plain_run, weights
from torch.nn.functional import cross_entropy

from neumann import Neumann

lightning = pytest.importorskip("lightning.pytorch")

from neumann.integrations.lightning import EvaluationWeights  # noqa: E402

MARKS = [
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


def saved_weights(path):
    state_dict = torch.load(path, weights_only=True)["state_dict"]
    return [state_dict[f"network.{name}"] for name, _ in network().named_parameters()]
