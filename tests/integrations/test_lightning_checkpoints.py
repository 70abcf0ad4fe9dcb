"""Lightning checkpoints with EvaluationWeights hold w − μm and resume exactly."""

import pytest
import torch

from tests.support.lightning_runs import (
    IGNORED_WARNINGS,
    Module,
    assert_matches_plain_loop,
    lightning,
    load_saved_weights,
    make_trainer,
)
from tests.support.plain_loop import EPOCH, equal, loader, run_plain_loop, weights

pytestmark = IGNORED_WARNINGS


@pytest.mark.parametrize("where", ["validation end", "epoch end", "epoch end, no validation"])
def test_a_checkpoint_after_evaluation_has_the_right_weights_and_resumes(tmp_path, where):
    trained, evaluated = run_plain_loop(3 * EPOCH)
    validation = None if "no validation" in where else loader()
    checkpoint = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, save_on_train_epoch_end=where != "validation end"
    )
    make_trainer(checkpoint, max_epochs=2).fit(Module(), loader(), validation)
    path = tmp_path / f"step={EPOCH}.ckpt"
    assert equal(load_saved_weights(path), evaluated[EPOCH])

    resumed = Module()
    trainer = make_trainer()
    trainer.fit(resumed, loader(), validation, ckpt_path=path)
    if validation is not None:
        assert_matches_plain_loop(resumed)
    assert resumed.trained[-1][0] == 3 * EPOCH
    assert equal(weights(resumed), evaluated[3 * EPOCH])
    trainer.optimizers[0].train()
    assert equal(weights(resumed), trained[3 * EPOCH])


class Resumable:
    """Batches that save their position, which Lightning needs to resume within an epoch."""

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
def test_a_checkpoint_between_batches_has_the_right_weights_and_resumes(tmp_path, step):
    _, evaluated = run_plain_loop(3 * EPOCH)
    every = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1
    )
    module = Module()
    make_trainer(every).fit(module, Resumable())
    assert all(training for _, training, _ in module.trained)  # the live model did not change
    path = tmp_path / f"step={step}.ckpt"
    assert equal(load_saved_weights(path), evaluated[step])

    resumed = Module()
    make_trainer().fit(resumed, Resumable(), ckpt_path=path)
    assert resumed.trained[0][0] == step + 1
    resumed.evaluated.append((step, evaluated[step]))
    assert_matches_plain_loop(resumed)


def test_a_checkpoint_may_be_written_between_forward_and_backward(tmp_path):
    _, evaluated = run_plain_loop(3 * EPOCH)

    class Saving(Module):
        def training_step(self, batch):
            loss = super().training_step(batch)
            if self.trainer.global_step == 10:
                self.trainer.save_checkpoint(tmp_path / "10.ckpt")
            return loss

    module = Saving()
    make_trainer().fit(module, loader(), loader())
    assert equal(load_saved_weights(tmp_path / "10.ckpt"), evaluated[10])
    assert_matches_plain_loop(module)


@pytest.mark.parametrize("trigger", [{"every_n_train_steps": 5}, {"every_n_epochs": 1}], ids=str)
def test_a_checkpoint_of_the_weights_only_holds_the_evaluation_weights(tmp_path, trigger):
    _, evaluated = run_plain_loop(3 * EPOCH)
    only = lightning.callbacks.ModelCheckpoint(
        tmp_path, "{step}", save_weights_only=True, save_top_k=-1, **trigger
    )
    module = Module()
    make_trainer(only).fit(module, loader())
    found = {int(path.stem.split("=")[1]): load_saved_weights(path) for path in tmp_path.iterdir()}
    assert set(found) == ({5, 10, 15} if "every_n_train_steps" in trigger else {6, 12, 18})
    assert all(equal(weights, evaluated[step]) for step, weights in found.items())
    module.evaluated = list(found.items())
    assert_matches_plain_loop(module)


def test_after_fit_everything_uses_the_evaluation_weights(tmp_path):
    _, evaluated = run_plain_loop(3 * EPOCH)
    best = lightning.callbacks.ModelCheckpoint(tmp_path, "best", monitor="loss")
    trainer, module = make_trainer(best), Module()
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert equal(load_saved_weights(tmp_path / "end.ckpt"), evaluated[-1])
    assert equal(load_saved_weights(tmp_path / "weights.ckpt"), evaluated[-1])

    module.evaluated.clear()
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(module, loader())
        trainer.optimizers[0].train()  # the next evaluation calls eval() itself
    trainer.optimizers[0].eval()
    assert len(module.evaluated) == 3 * EPOCH
    assert all(equal(found, evaluated[-1]) for _, found in module.evaluated)

    module.evaluated.clear()
    trainer.test(module, loader(), ckpt_path="best", verbose=False)
    assert all(equal(found, evaluated[EPOCH]) for _, found in module.evaluated)  # corrected once

    resumed = Module()
    make_trainer(max_epochs=4).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "end.ckpt")
    assert_matches_plain_loop(resumed, 4 * EPOCH)


def test_gathered_weights_are_left_alone(tmp_path):
    """If a strategy gathers the weights, the checkpoint holds w, in training mode."""
    trained, _ = run_plain_loop(3 * EPOCH)

    class Gather(Module):
        def state_dict(self, *arguments, **options):
            return {k: v.clone() for k, v in super().state_dict(*arguments, **options).items()}

    every = lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10)
    make_trainer(every).fit(Gather(), loader())
    assert equal(load_saved_weights(tmp_path / "step=10.ckpt"), trained[10])
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    assert all(group["training"] for group in saved["optimizer_states"][0]["param_groups"])
