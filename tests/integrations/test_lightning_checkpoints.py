"""What Lightning saves with EvaluationWeights: the corrected weights, and exactly resumable."""

import pytest
import torch
from lightning_runs import (
    MARKS,
    Module,
    assert_is_the_plain_run,
    lightning,
    saved_weights,
    trainer_with,
)
from plain import EPOCH, equal, loader, plain_run, weights

pytestmark = MARKS


@pytest.mark.parametrize("where", ["validation end", "epoch end", "epoch end, no validation"])
def test_a_checkpoint_after_evaluation_ships_and_resumes_exactly(tmp_path, where):
    trained, shown = plain_run(3 * EPOCH)
    validation = None if "no validation" in where else loader()
    checkpoint = lightning.callbacks.ModelCheckpoint(
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
    every = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1
    )
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
    only = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", save_weights_only=True, save_top_k=-1, **trigger
    )
    module = Module()
    trainer_with(only).fit(module, loader())
    found = {int(path.stem.split("=")[1]): saved_weights(path) for path in tmp_path.iterdir()}
    assert set(found) == ({5, 10, 15} if "every_n_train_steps" in trigger else {6, 12, 18})
    assert all(equal(weights, shown[step]) for step, weights in found.items())
    module.shown = list(found.items())
    assert_is_the_plain_run(module)


def test_after_fit_everything_is_of_the_corrected_weights(tmp_path):
    _, shown = plain_run(3 * EPOCH)
    best = lightning.callbacks.ModelCheckpoint(tmp_path, "best", monitor="loss")
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


def test_weights_that_are_not_the_parameters_are_left_alone(tmp_path):
    """As a strategy gathers them: such a checkpoint stays one of w, in training mode."""
    trained, _ = plain_run(3 * EPOCH)

    class Gather(Module):
        def state_dict(self, *arguments, **options):
            return {k: v.clone() for k, v in super().state_dict(*arguments, **options).items()}

    every = lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10)
    trainer_with(every).fit(Gather(), loader())
    assert equal(saved_weights(tmp_path / "step=10.ckpt"), trained[10])
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    assert all(group["training"] for group in saved["optimizer_states"][0]["param_groups"])
