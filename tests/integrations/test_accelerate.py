"""Accelerate: the prepared optimizer forwards train() and eval(); save_state() keeps the mode."""

import pytest
from torch.nn.functional import cross_entropy

from tests.support.plain_loop import EPOCH, OPTIONS, equal, loader, network, run_plain_loop, weights

accelerate = pytest.importorskip("accelerate")

from neumann import Neumann  # noqa: E402


@pytest.fixture(autouse=True)
def _one_accelerator_after_another():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(**options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    return accelerator, *accelerator.prepare(model, optimizer, loader())


def epoch(accelerator, model, optimizer, batches):
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def test_evaluation_uses_the_evaluation_weights_and_training_continues_from_w():
    trained, evaluated = run_plain_loop(3 * EPOCH)
    accelerator, model, optimizer, batches = prepared()
    for end in (EPOCH, 2 * EPOCH, 3 * EPOCH):
        for _ in range(2):  # a second call changes nothing
            optimizer.train()
        epoch(accelerator, model, optimizer, batches)
        assert equal(weights(model), trained[end])
        for _ in range(2):
            optimizer.eval()
            assert equal(weights(model), evaluated[end])
        assert not equal(evaluated[end], trained[end])


def test_gradient_accumulation_counts_optimizer_steps():
    trained, evaluated = run_plain_loop(6, accumulate=2)
    accelerator, model, optimizer, batches = prepared(gradient_accumulation_steps=2)
    for end in (3, 6):
        optimizer.train()
        epoch(accelerator, model, optimizer, batches)
        assert equal(weights(model), trained[end])
        optimizer.eval()
        assert equal(weights(model), evaluated[end])


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_a_state_saved_after_evaluation_resumes_exactly(tmp_path, safe_serialization):
    trained, evaluated = run_plain_loop(3 * EPOCH)
    accelerator, model, optimizer, batches = prepared()
    epoch(accelerator, model, optimizer, batches)
    optimizer.eval()
    accelerator.save_state(tmp_path, safe_serialization=safe_serialization)

    accelerator, model, optimizer, batches = prepared()
    accelerator.load_state(tmp_path)
    assert equal(weights(model), evaluated[EPOCH])
    optimizer.train()
    assert equal(weights(model), trained[EPOCH])
    epoch(accelerator, model, optimizer, batches)
    epoch(accelerator, model, optimizer, batches)
    assert equal(weights(model), trained[3 * EPOCH])


def test_save_model_writes_the_evaluation_weights(tmp_path):
    """save_model() writes what the parameters hold, so call eval() first."""
    from safetensors.torch import load_file

    _, evaluated = run_plain_loop(EPOCH)
    accelerator, model, optimizer, batches = prepared()
    epoch(accelerator, model, optimizer, batches)
    optimizer.eval()
    accelerator.save_model(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert equal([saved[name] for name, _ in model.named_parameters()], evaluated[EPOCH])


def test_the_prepared_optimizer_gives_access_to_neumann():
    accelerator, model, optimizer, batches = prepared()
    epoch(accelerator, model, optimizer, batches)
    before = weights(model)
    with optimizer.optimizer.evaluating():
        assert not equal(weights(model), before)
    assert equal(weights(model), before)


def test_the_example_runs(example, capsys):
    example("accelerate_digits").main(epochs=7)  # past the warm-up
    assert "test accuracy" in capsys.readouterr().out
