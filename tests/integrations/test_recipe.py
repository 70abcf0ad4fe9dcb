"""The recipe in each framework: one call sets up roles and schedule, and both reach the end."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import neumann
from neumann import Neumann
from neumann.optim.recipe import choose_weight_decay
from tests.support.lightning_runs import IGNORED_WARNINGS
from tests.support.plain_loop import dataset, network

STEPS = 6

pytestmark = IGNORED_WARNINGS


@pytest.fixture
def _fresh_accelerator():
    state = pytest.importorskip("accelerate").state.AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


def make_loader():
    return DataLoader(dataset(), batch_size=16, drop_last=True)


def roles_of(optimizer):
    return {group["role"] for group in optimizer.param_groups}


def test_lightning():
    lightning = pytest.importorskip("lightning.pytorch")
    from neumann.integrations.lightning import large_batch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()
            self.rates = []

        def training_step(self, batch):
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return large_batch(self, lr=0.5)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, enable_model_summary=False, **quiet
    )
    trainer.fit(module, make_loader())
    assert roles_of(trainer.optimizers[0]) >= {"hidden", "output"}
    # One step of ramp at the peak, then a straight line to 0.
    assert module.rates == pytest.approx([0.5, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_lightning_without_an_end():
    pytest.importorskip("lightning.pytorch")
    from neumann.integrations.lightning import large_batch

    class Endless:
        class trainer:
            estimated_stepping_batches = float("inf")

    with pytest.raises(ValueError, match="give it max_steps, or max_epochs and data"):
        large_batch(Endless())
    Endless.trainer.estimated_stepping_batches = -1
    with pytest.raises(ValueError, match="give it max_steps, or max_epochs and data"):
        large_batch(Endless())


def test_lightning_needs_the_module_or_steps():
    pytest.importorskip("lightning.pytorch")
    from neumann.integrations.lightning import large_batch

    with pytest.raises(TypeError, match="from Sequential: pass a LightningModule"):
        large_batch(network())
    assert roles_of(large_batch(network(), steps=STEPS)["optimizer"]) >= {"hidden", "output"}


@pytest.mark.usefixtures("_fresh_accelerator")
@pytest.mark.parametrize("processes", [1, 4])
def test_accelerate(processes, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from neumann.integrations.accelerate import large_batch

    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    if processes > 1:  # the schedule is stepped once for each of them
        for state in (accelerate.state.PartialState, accelerate.state.AcceleratorState):
            monkeypatch.setitem(state._shared_state, "num_processes", processes)
        assert accelerator.num_processes == processes
    optimizer, schedule = large_batch(accelerator, model, STEPS, lr=0.5)
    assert roles_of(optimizer) >= {"hidden", "output"}
    hidden = next(group for group in optimizer.param_groups if group["role"] == "hidden")
    assert hidden["weight_decay"] == choose_weight_decay(model, STEPS, 0.5)  # not of the calls
    mixed, _ = large_batch(accelerator, network(), 100, slow_momentum=0.6)
    alone, _ = neumann.large_batch(network(), 100, slow_momentum=0.6)
    pairs = zip(mixed.param_groups, alone.param_groups, strict=True)
    assert all(one["precondition"] == other["precondition"] for one, other in pairs)
    prepared = accelerate.scheduler.AcceleratedScheduler(
        schedule, accelerate.optimizer.AcceleratedOptimizer(optimizer)
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        prepared.step()
    assert max(rates) <= 0.5
    assert rates[-1] > 0.05
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
        large_batch(accelerator, model, 0)
    with pytest.raises(TypeError, match="accelerator must be an Accelerator, got Sequential"):
        large_batch(model, accelerator, 5)


def test_lightning_warns_of_a_long_warmup():
    lightning = pytest.importorskip("lightning.pytorch")
    from neumann.integrations.lightning import EvaluationWeights

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch):
            return cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return Neumann(self.parameters(), lr=0.1, warmup_steps=4, reset_steps=2)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, callbacks=[EvaluationWeights()], **quiet
    )
    with pytest.warns(UserWarning, match="warm-up of 4 steps covers most of the run's 6"):
        trainer.fit(Module(), make_loader())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels):
        logits = self.network(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def train_with_trainer(folder, model, **options):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        learning_rate=0.5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=examples(), **options)
    trainer.train()
    return trainer


def examples():
    data = dataset()
    return [{"x": x, "labels": y} for x, y in (data[i] for i in range(len(data)))]


def find_optimizer(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def test_trainer_with_optimizers(tmp_path):
    pytest.importorskip("transformers")
    from neumann.integrations.transformers import large_batch

    model = Model()
    with pytest.raises(ValueError, match="max_steps is -1, because the Trainer counts epochs"):
        large_batch(model, -1)
    own = pytest.importorskip("transformers").TrainerCallback()
    chosen = large_batch(model, STEPS, callbacks=[own])
    assert chosen["callbacks"][0] is own
    trainer = train_with_trainer(tmp_path, model, **chosen)
    optimizer = find_optimizer(trainer)
    assert isinstance(optimizer, Neumann)
    assert roles_of(optimizer) >= {"hidden", "output"}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert not optimizer.training  # the callback leaves the weights to ship


def test_trainer_with_a_factory(tmp_path):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.trainer, "is_optimizer_factory"):
        pytest.skip("this version of transformers takes no factories")
    from neumann.integrations.transformers import NeumannByRole

    chosen = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.3, "roles": {"*bias": "vector"}}
    trainer = train_with_trainer(
        tmp_path, Model(), optimizer_cls_and_kwargs=(NeumannByRole, chosen)
    )
    optimizer = find_optimizer(trainer)
    hidden = next(group for group in optimizer.param_groups if group["role"] == "hidden")
    assert (hidden["weight_decay"], hidden["momentum"]) == (0.25, 0.3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_factory_needs_steps_or_a_decay():
    pytest.importorskip("transformers")
    from neumann.integrations.transformers import NeumannByRole

    for given in ({}, {"weight_decay": "auto"}):
        optimizer = NeumannByRole()(network(), lr=0.5, steps=100, **given)
        hidden = next(group for group in optimizer.param_groups if group["role"] == "hidden")
        assert hidden["weight_decay"] == choose_weight_decay(network(), 100, 0.5)
    with pytest.raises(ValueError, match="needs the optimizer steps of the whole run"):
        NeumannByRole()(network())


def test_the_trainer_warns_of_a_long_warmup(tmp_path):
    pytest.importorskip("transformers")
    from neumann.integrations.transformers import EvaluationWeights

    model = Model()
    optimizer = Neumann(model.parameters(), lr=0.1, warmup_steps=STEPS, reset_steps=2)
    with pytest.warns(UserWarning, match="warm-up of 6 steps covers all of the run's 6"):
        train_with_trainer(
            tmp_path, model, optimizers=(optimizer, None), callbacks=[EvaluationWeights()]
        )


def test_the_gpt_example(example, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    size = {"steps": 30, "batch": 8, "width": 32, "depth": 1, "lr": 0.02, "device": "cpu"}
    assert example("gpt_text").train(text, **size) < 2.0  # 5.5 at the start
    assert torch.load("gpt.pt")["head.weight"].shape == (256, 32)
    assert "validation loss" in capsys.readouterr().out
    for content in ("short", ""):
        (tmp_path / "short.txt").write_text(content)
        with pytest.raises(SystemExit, match=f"has {len(content)} bytes"):
            example("gpt_text").train(tmp_path / "short.txt", **size)


def test_the_trainer_example(example, capsys):
    pytest.importorskip("transformers")
    assert example("hf_causal_lm").main(steps=30) < 3.0
    assert "nats per byte" in capsys.readouterr().out
