"""Hugging Face's Trainer switches by itself; EvaluationWeights keeps w out of its checkpoints."""

import importlib
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from tests.support.plain_loop import (
    EPOCH,
    OPTIONS,
    dataset,
    equal,
    network,
    run_plain_loop,
    weights,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from safetensors.torch import load_file  # noqa: E402

from neumann.integrations.transformers import EvaluationWeights  # noqa: E402


class Model(nn.Module):
    """Records the weights at every evaluation."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.evaluated = []

    def forward(self, x, labels):
        if not self.training:
            self.evaluated.append(weights(self))
        logits = self.network(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Watch(transformers.TrainerCallback):
    """Records step and weights after each step; training ends after the step `stop`."""

    def __init__(self, stop=None):
        self.trained, self.stop = [], stop

    def on_step_end(self, args, state, control, model, optimizer, **_):
        assert optimizer.optimizer.training
        self.trained.append((state.global_step, weights(model)))
        control.should_training_stop |= state.global_step == self.stop


def make_trainer(directory, *callbacks, **options):
    model = Model()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    options = {"num_train_epochs": 3, "save_strategy": "no"} | options
    arguments = transformers.TrainingArguments(
        str(directory),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16 * EPOCH,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    data = [{"x": x, "labels": y} for x, y in dataset()]
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )


def make_trainer_of_best(directory, stop):
    """It loads the best of its checkpoints after the step `stop`."""
    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 7, "save_steps": 7}
    callbacks = Watch(stop=stop), EvaluationWeights()
    return make_trainer(directory, *callbacks, **often, load_best_model_at_end=True)


def load_saved_weights(directory):
    saved = load_file(directory / "model.safetensors")
    return [saved[f"network.{name}"] for name, _ in network().named_parameters()]


@pytest.mark.parametrize("callbacks", [[], [EvaluationWeights]], ids=["alone", "with callback"])
def test_evaluation_uses_the_evaluation_weights_and_training_is_unaffected(tmp_path, callbacks):
    trained, evaluated = run_plain_loop(3 * EPOCH)
    watch = Watch()
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer = make_trainer(tmp_path, watch, *(callback() for callback in callbacks), **options)
    trainer.train()
    assert len(trainer.model.evaluated) == 1 + 3 * EPOCH // 2
    assert all(equal(found, evaluated[2 * i]) for i, found in enumerate(trainer.model.evaluated))
    assert [step for step, _ in watch.trained] == list(range(1, 3 * EPOCH + 1))
    assert all(equal(found, trained[step]) for step, found in watch.trained)

    trainer.evaluate()
    trainer.evaluate()
    assert equal(trainer.model.evaluated[-1], evaluated[-1])
    trainer.optimizer.train()
    assert equal(weights(trainer.model), trained[-1])


def test_gradient_accumulation_counts_optimizer_steps(tmp_path):
    _, evaluated = run_plain_loop(9, accumulate=2)
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    trainer = make_trainer(tmp_path, EvaluationWeights(), **options)
    trainer.train()
    assert all(
        equal(found, evaluated[step])
        for found, step in zip(trainer.model.evaluated, (3, 6, 9), strict=True)
    )


# Between two steps (in the warm-up, at a reset, later), right after an evaluation, after an epoch.
@pytest.mark.parametrize(
    ("step", "options"),
    [(step, {"save_strategy": "steps", "save_steps": step}) for step in (2, 4, 9)]
    + [(9, {"eval_strategy": "steps", "eval_steps": 9, "save_strategy": "steps", "save_steps": 9})]
    + [(EPOCH, {"eval_strategy": "epoch", "save_strategy": "epoch"})]
    + [(EPOCH, {"save_strategy": "epoch"})],
    ids=str,
)
def test_a_checkpoint_has_the_right_weights_and_resumes(tmp_path, step, options):
    trained, evaluated = run_plain_loop(3 * EPOCH)
    make_trainer(tmp_path, EvaluationWeights(), **options).train()
    checkpoint = tmp_path / f"checkpoint-{step}"
    assert equal(load_saved_weights(checkpoint), evaluated[step])

    watch = Watch()
    resumed = make_trainer(tmp_path / "resumed", watch, EvaluationWeights())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [at for at, _ in watch.trained] == list(range(step + 1, 3 * EPOCH + 1))
    assert all(equal(found, trained[at]) for at, found in watch.trained)
    assert equal(weights(resumed.model), evaluated[-1])


def test_without_the_callback_a_checkpoint_holds_w_and_resumes_exactly(tmp_path):
    """Why the callback exists. This test fails if the Trainer learns to switch by itself."""
    trained, _ = run_plain_loop(3 * EPOCH)
    make_trainer(tmp_path, save_strategy="steps", save_steps=10).train()
    assert equal(load_saved_weights(tmp_path / "checkpoint-10"), trained[10])
    resumed = make_trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert equal(weights(resumed.model), trained[-1])


def test_saved_weights_and_the_trained_model_are_the_evaluation_weights(tmp_path):
    _, evaluated = run_plain_loop(3 * EPOCH)
    options = {"save_strategy": "steps", "save_steps": 10, "save_only_model": True}
    trainer = make_trainer(tmp_path, EvaluationWeights(), **options)
    trainer.train()
    assert equal(load_saved_weights(tmp_path / "checkpoint-10"), evaluated[10])
    trainer.save_model(tmp_path / "shipped")
    assert equal(load_saved_weights(tmp_path / "shipped"), evaluated[-1])


@pytest.mark.parametrize("stop", [14, 15], ids=["evaluated last", "trained last"])
def test_the_best_model_is_corrected_once(tmp_path, stop):
    """If it were loaded in training mode, the next evaluation would correct it again."""
    _, evaluated = run_plain_loop(3 * EPOCH)
    trainer = make_trainer_of_best(tmp_path, stop=stop)
    trainer.train()
    best = trainer.state.best_global_step
    assert best in (7, 14)
    assert equal(weights(trainer.model), evaluated[best])
    trainer.evaluate()
    assert equal(trainer.model.evaluated[-1], evaluated[best])


def test_a_second_training_does_not_lose_the_best_model_in_silence(tmp_path):
    trainer = make_trainer_of_best(tmp_path, stop=15)
    trainer.train()
    with pytest.warns(UserWarning, match="with a trainer, build a new one"):
        trainer.train()


def test_a_second_training_that_continues_is_silent(tmp_path, recwarn):
    trainer = make_trainer(tmp_path, EvaluationWeights(), max_steps=2)
    trainer.train()
    trainer.train()
    assert not [each for each in recwarn if "build a new one" in str(each.message)]


def test_the_trainer_may_build_the_optimizer(tmp_path):
    built = make_trainer(tmp_path, EvaluationWeights(), weight_decay=0.1)
    built.optimizer, built.optimizer_cls_and_kwargs = None, (Neumann, OPTIONS)
    built.train()
    inside = built.optimizer.optimizer
    assert not inside.training
    assert [group["weight_decay"] for group in inside.param_groups] == [0.1, 0]


def test_another_optimizer_is_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, EvaluationWeights(), max_steps=2)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train()


def test_a_missing_package_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "neumann.integrations.transformers")
    with pytest.raises(ImportError, match=r'pip install "\.\[transformers\]"'):
        importlib.import_module("neumann.integrations.transformers")


@pytest.mark.filterwarnings("ignore:the optimizer.s SGD warm-up")  # the run is short
def test_the_example_runs(example, capsys):
    example("transformers_digits").main(epochs=7)  # past the warm-up
    assert "test accuracy" in capsys.readouterr().out
