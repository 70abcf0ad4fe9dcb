"""Training weights, evaluation weights, the average, and BatchNorm statistics that fit them."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from neumann import Neumann, recalibrate_batchnorm
from neumann.optim import modes
from tests.support.small_model import equal, model_and_optimizer, train, weights

CLOCK = {"warmup_steps": 3, "reset_steps": 4}


def evaluation_by_hand(optimizer):
    return [
        p.detach() - float(optimizer.state[p]["momentum"]) * optimizer.state[p]["iterate"]
        for group in optimizer.param_groups
        for p in group["params"]
    ]


@pytest.mark.parametrize("steps", [2, 4, 6, 11])  # warm-up, reset, iterate, later
def test_eval_shows_the_corrected_weights_and_train_brings_w_back(steps):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, steps)
    displaced, corrected = weights(model), evaluation_by_hand(optimizer)
    assert optimizer.eval() is optimizer
    assert not optimizer.training
    assert equal(weights(model), corrected)
    assert (steps > 3) == (not equal(displaced, corrected))
    assert optimizer.eval() is optimizer  # idempotent
    assert equal(weights(model), corrected)
    assert optimizer.train() is optimizer
    assert equal(weights(model), displaced)
    optimizer.train()
    assert equal(weights(model), displaced)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_toggling_never_loses_a_bit(dtype):
    model, optimizer = model_and_optimizer(dtype=dtype)
    train(model, optimizer, 8)
    displaced = weights(model)
    corrected = weights_after_eval = None
    for _ in range(50):
        optimizer.eval()
        weights_after_eval = weights(model)
        assert corrected is None or equal(corrected, weights_after_eval)
        corrected = weights_after_eval
        optimizer.train()
        assert equal(displaced, weights(model))
    assert not equal(displaced, corrected)
    assert all("weights" not in state for state in optimizer.state.values())


def test_evaluations_do_not_change_a_run():
    watched, optimizer = model_and_optimizer()
    alone, other = model_and_optimizer()
    for step in range(15):
        train(watched, optimizer, 1, start=step)
        train(alone, other, 1, start=step)
        optimizer.eval()
        optimizer.train()
        with optimizer.evaluating():
            pass
    assert equal(weights(watched), weights(alone))


def test_an_eval_that_fails_leaves_training_weights(monkeypatch):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    displaced = weights(model)
    calls = iter(range(10))
    real = modes.compute_evaluation

    def failing(*arguments):
        if next(calls) == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(modes, "compute_evaluation", failing)
    with pytest.raises(MemoryError):
        optimizer.eval()
    assert optimizer.training
    assert equal(displaced, weights(model))
    assert all("weights" not in state for state in optimizer.state.values())


def test_step_in_evaluation_mode_raises():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 5)
    optimizer.eval()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\) first"):
        optimizer.step()
    assert equal(before, weights(model))


def test_evaluating_survives_exceptions_and_nests():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    displaced, corrected = weights(model), evaluation_by_hand(optimizer)

    def evaluate():
        with optimizer.evaluating() as entered:
            assert entered is optimizer
            assert equal(weights(model), corrected)
            with optimizer.evaluating():
                assert equal(weights(model), corrected)
            assert not optimizer.training
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert optimizer.training
    assert equal(weights(model), displaced)
    optimizer.eval()
    with optimizer.evaluating():
        pass
    assert not optimizer.training


def test_eval_params_leave_the_model_alone_and_fit_functional_call():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 7)
    displaced = weights(model)
    found = optimizer.eval_params()
    assert equal(found.values(), evaluation_by_hand(optimizer))
    assert equal(weights(model), displaced)
    x = torch.randn(4, 5, dtype=torch.float64)
    called = torch.func.functional_call(model, found, (x,))
    with optimizer.evaluating():
        assert torch.equal(called, model(x))
        assert equal(optimizer.eval_params().values(), found.values())
    found["0.weight"].zero_()  # a copy
    assert equal(weights(model), displaced)


def test_average_params_follow_the_printed_recursion():
    model, optimizer = model_and_optimizer(named=False)
    average = weights(model)
    assert equal(optimizer.average_params(), average)
    for step in range(14):
        train(model, optimizer, 1, start=step)
        if optimizer.diagnostics().phase == "iterate":
            average = [w + 0.99 * (v - w) for w, v in zip(weights(model), average, strict=True)]
        for found, expected in zip(optimizer.average_params(), average, strict=True):
            assert torch.allclose(found, expected, rtol=1e-12)
        with optimizer.evaluating():
            for found, expected in zip(optimizer.average_params(), average, strict=True):
                assert torch.allclose(found, expected, rtol=1e-12)


def test_an_average_that_starts_now_is_a_copy_of_the_weights():
    model, optimizer = model_and_optimizer(cubic=0.0, repulsive=0.0)
    train(model, optimizer, 6)
    optimizer.param_groups[0]["cubic"] = 0.1
    average = optimizer.average_params()["0.weight"]
    assert torch.equal(average, model[0].weight)
    assert average.data_ptr() != model[0].weight.data_ptr()


def test_evaluation_weights_are_rounded_once():
    """w − μm of bfloat16 weights is computed in float32."""
    generator = torch.Generator().manual_seed(0)
    w, m = (torch.randn(1_000, generator=generator).bfloat16() for _ in "wm")
    p = nn.Parameter(w.clone())
    optimizer = Neumann([p], lr=0.1, warmup_steps=0, reset_steps=0)
    optimizer.state[p]["iterate"].copy_(m)
    optimizer.state[p]["momentum"].fill_(0.9)
    optimizer.eval()
    assert torch.equal(p, (w.float() - 0.9 * m.float()).bfloat16())


def test_frozen_parameters_are_listed_unchanged():
    model, _ = model_and_optimizer()
    model[0].requires_grad_(False)
    optimizer = Neumann(model.named_parameters(), lr=0.1, **CLOCK)
    train(model, optimizer, 8)
    for found in (optimizer.eval_params(), optimizer.average_params()):
        assert torch.equal(found["0.weight"], model[0].weight)
        assert found["0.weight"].data_ptr() != model[0].weight.data_ptr()
        assert not torch.equal(found["2.weight"], model[2].weight)
    with optimizer.evaluating():
        assert torch.equal(model[2].weight, optimizer.eval_params()["2.weight"])


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_layer_frozen_in_the_middle_is_the_same_in_both_modes(options):
    """From the next step on; what is frozen for an inference only loses nothing."""
    model, optimizer = model_and_optimizer(reset_steps=0, **options)
    other, twin = model_and_optimizer(reset_steps=0, **options)
    train(model, optimizer, 6)
    train(other, twin, 6)
    model.requires_grad_(False)
    with optimizer.evaluating():
        assert not torch.equal(model[0].weight, other[0].weight)
    model.requires_grad_(True)
    train(model, optimizer, 1, start=6)
    train(other, twin, 1, start=6)
    assert equal(weights(model), weights(other))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    train(model, optimizer, 2, start=7)
    with optimizer.evaluating():
        assert torch.equal(model[0].weight, frozen)
        assert not torch.equal(model[2].weight, optimizer.state[model[2].weight]["weights"])
    model[0].requires_grad_(True)
    train(model, optimizer, 1, start=9)
    assert not torch.equal(model[0].weight, frozen)
    with optimizer.evaluating():
        assert not torch.equal(model[0].weight, optimizer.state[model[0].weight]["weights"])
    model[0].requires_grad_(False)  # once more
    train(model, optimizer, 1, start=10)
    assert not optimizer.state[model[0].weight]["iterate"].any()


def test_a_group_added_in_evaluation_mode():
    model, optimizer = model_and_optimizer(named=False)
    train(model, optimizer, 6)
    optimizer.eval()
    late = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [late]})
    optimizer.train()
    assert torch.equal(late, torch.ones(3))
    train(model, optimizer, 1, start=6)


# ---------------------------------------------------------------------- BatchNorm


def batchnorm_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Dropout(), nn.BatchNorm1d(4)
    )


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 5, generator=generator), None) for _ in range(count)]


def test_recalibration_gives_the_statistics_of_the_data():
    model = batchnorm_model().eval()
    recalibrate_batchnorm(model, batches())
    outputs = [model[0](x) for x, _ in batches()]
    assert torch.allclose(model[1].running_mean, torch.stack([o.mean(0) for o in outputs]).mean(0))
    assert torch.allclose(model[1].running_var, torch.stack([o.var(0) for o in outputs]).mean(0))


def test_recalibration_takes_as_many_batches_as_asked():
    model, other = batchnorm_model(), batchnorm_model()
    recalibrate_batchnorm(model, batches(5), batches=2)
    recalibrate_batchnorm(other, batches(2))
    assert torch.equal(model[1].running_mean, other[1].running_mean)


def test_recalibration_takes_batches_of_any_form():
    """As loaders of torch, of Hugging Face, and of plain tensors give them."""

    class Named(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, labels=None):
            return self.layer(x)

    class Whole(Named):
        def forward(self, batch):
            return self.layer(batch["x"])

    found = []
    x = torch.randn(16, 3)
    named = {"x": x, "labels": "label"}
    for kind, batch in ((Named, x), (Named, (x, "label")), (Named, named), (Whole, named)):
        layer = nn.BatchNorm1d(3)
        recalibrate_batchnorm(kind(layer), [batch], device=torch.device("cpu"))
        found.append(layer.running_mean)
    assert torch.allclose(found[0], x.mean(0), atol=1e-6)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[3])


def test_recalibration_restores_everything_else():
    model = batchnorm_model()
    model.eval()
    model[2].train()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002

    def noisy():
        for x, y in batches():
            yield x + 0 * random.random() + 0 * np.random.rand(), y  # noqa: NPY002

    recalibrate_batchnorm(model, noisy())
    assert [m.training for m in model.modules()] == [False, False, False, True, False]
    assert [model[1].momentum, model[3].momentum] == [0.3, 0.1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002


@pytest.mark.parametrize("shuffle", [True, False])
def test_recalibration_with_a_loader_does_not_change_the_training(shuffle):
    model = batchnorm_model()
    data = torch.utils.data.TensorDataset(torch.randn(32, 5))
    own = torch.Generator().manual_seed(3)
    for generator in (None, own):
        loader = torch.utils.data.DataLoader(data, 8, shuffle=shuffle, generator=generator)
        torch.manual_seed(1)
        before = (torch.get_rng_state(), own.get_state())
        recalibrate_batchnorm(model, loader, batches=2)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(own.get_state(), before[1])


def test_recalibration_that_fails_changes_nothing():
    model = batchnorm_model().eval()
    recalibrate_batchnorm(model, batches(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()

    def breaking():
        yield batches(1)[0]
        raise KeyError("disk")

    with pytest.raises(KeyError):
        recalibrate_batchnorm(model, breaking())
    with pytest.raises(ValueError, match="loader gave no batch"):
        recalibrate_batchnorm(model, [])
    with pytest.raises(ValueError, match="batches must be None or at least 1, got 0"):
        recalibrate_batchnorm(model, batches(), batches=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m.training for m in model.modules())
    assert [model[1].momentum, model[3].momentum] == [0.3, 0.1]
    assert torch.equal(torch.get_rng_state(), state)


def test_recalibration_without_batchnorm_does_nothing():
    recalibrate_batchnorm(nn.Linear(2, 2), [])
