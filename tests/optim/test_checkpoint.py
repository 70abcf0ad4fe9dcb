"""Stop anywhere, save, load in a new process, continue: the same bits."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from neumann import Neumann
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.programs import run
from tests.support.small_model import equal, model_and_optimizer, train, weights

STRONG = {"cubic": 0.05, "repulsive": 0.05}
LAST = 20
# The clock of model_and_optimizer: warm-up 1-3, resets at steps 4, 8, 16.
PHASES = {"before": 0, "warm-up": 2, "end of warm-up": 3, "reset": 4, "iterate": 6, "later": 13}


def finish(model, optimizer, start):
    train(model, optimizer, LAST - start, start=start)
    return weights(model), list(optimizer.eval_params().values())


# float32 stops in every phase, the other dtypes in two. Triton is slow where it is interpreted.
RESUMED = [
    (phase, dtype, implementation)
    for implementation in IMPLEMENTATIONS
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    for phase in (PHASES if dtype == torch.float32 else ("reset", "iterate"))
    if implementation != "triton"
    or (dtype == torch.float32 and phase in ("warm-up", "reset", "iterate"))
]


@pytest.mark.parametrize(("phase", "dtype", "implementation"), RESUMED)
def test_a_resumed_run_has_the_same_bits(phase, dtype, implementation, tmp_path):
    stop = PHASES[phase]
    options = {"dtype": dtype, **STRONG, **IMPLEMENTATIONS[implementation]}
    expected = finish(*model_and_optimizer(**options), 0)
    model, optimizer = model_and_optimizer(**options)
    train(model, optimizer, stop)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c", weights_only=True)
    fresh, other = model_and_optimizer(**options)
    with torch.no_grad():
        for p in fresh.parameters():
            p.add_(1)
    fresh.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert other.diagnostics().as_dict() == optimizer.diagnostics().as_dict()
    for kind, found in zip(expected, finish(fresh, other, stop), strict=True):
        assert equal(kind, found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_state_that_was_moved_by_a_trainer(implementation):
    """Lightning moves all but the clock to the device and back: copies take their place."""
    options = {**STRONG, **IMPLEMENTATIONS[implementation]}
    expected = finish(*model_and_optimizer(**options), 0)
    model, optimizer = model_and_optimizer(**options)

    def move():
        for entry in optimizer.state.values():
            for key in entry:
                if key != "step":
                    entry[key] = entry[key].clone()

    move()
    train(model, optimizer, 9)
    move()
    evaluated = list(optimizer.eval_params().values())
    move()
    optimizer.eval()
    assert equal(weights(model), evaluated)
    optimizer.train()
    move()
    saved = copy.deepcopy(optimizer.state_dict())
    other_model, other = model_and_optimizer(**options)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    move()
    for pair in ((model, optimizer), (other_model, other)):
        for kind, found in zip(expected, finish(*pair, 9), strict=True):
            assert equal(kind, found)


SCRIPT = """
import torch
from tests.optim.test_checkpoint import finish, model_and_optimizer, STRONG
model, optimizer = model_and_optimizer(dtype=torch.float32, foreach={foreach}, **STRONG)
saved = torch.load({file!r}, weights_only=True)
optimizer.load_state_dict(saved["optimizer"])
model.load_state_dict(saved["model"])
torch.save(finish(model, optimizer, {stop}), {file!r} + ".done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [True, False])
def test_in_a_new_process(foreach, tmp_path):
    options = {"dtype": torch.float32, "foreach": foreach, **STRONG}
    expected = finish(*model_and_optimizer(**options), 0)
    model, optimizer = model_and_optimizer(**options)
    stop = 10
    train(model, optimizer, stop)
    file = str(tmp_path / "c")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    script = SCRIPT.format(file=file, stop=stop, foreach=foreach)
    ended = run("-c", script)
    assert ended.returncode == 0, ended.stderr
    found = torch.load(file + ".done", weights_only=True)
    assert equal(expected[0], found[0])
    assert equal(expected[1], found[1])


@pytest.mark.filterwarnings("ignore:a scheduler cycles the momentum")
def test_with_a_scheduler_that_moves_momentum(tmp_path):
    def build():
        model, optimizer = model_and_optimizer(**STRONG)
        return model, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=LAST + 1)

    model, optimizer, scheduler = build()
    train(model, optimizer, LAST, scheduler=scheduler)
    half, first, first_scheduler = build()
    train(half, first, 9, scheduler=first_scheduler)
    saved = copy.deepcopy((half.state_dict(), first.state_dict(), first_scheduler.state_dict()))
    rest, second, second_scheduler = build()
    for part, state in zip((rest, second, second_scheduler), saved, strict=True):
        part.load_state_dict(state)
    assert equal(first.eval_params().values(), second.eval_params().values())
    train(rest, second, LAST - 9, start=9, scheduler=second_scheduler)
    assert equal(weights(model), weights(rest))


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("saved_in_eval", [True, False])
@pytest.mark.parametrize("loaded_in_eval", [True, False])
def test_either_mode(saved_in_eval, loaded_in_eval, model_first):
    """The saved mode is adopted, no parameter is written, and both weights are what they were."""
    expected, expected_evaluation = finish(*model_and_optimizer(**STRONG), 0)
    model, optimizer = model_and_optimizer(**STRONG)
    train(model, optimizer, 10)
    evaluation = list(optimizer.eval_params().values())
    optimizer.train(not saved_in_eval)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    fresh, other = model_and_optimizer(**STRONG)
    train(fresh, other, 5, start=100)
    other.train(not loaded_in_eval)
    if model_first:
        fresh.load_state_dict(saved[0])
    before = weights(fresh)
    other.load_state_dict(saved[1])
    assert equal(before, weights(fresh))
    if not model_first:
        fresh.load_state_dict(saved[0])
    assert other.training == (not saved_in_eval)
    with other.evaluating():
        assert equal(weights(fresh), evaluation)
    other.train()
    found, found_evaluation = finish(fresh, other, 10)
    assert equal(expected, found)
    assert equal(expected_evaluation, found_evaluation)


def test_the_loaded_dictionary_is_not_shared():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    results = []
    for _ in range(2):
        fresh, other = model_and_optimizer()
        fresh.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        results.append(finish(fresh, other, 6)[0])
    assert equal(*results)


def test_state_keeps_its_dtype():
    """torch casts state to the parameter's dtype (pytorch #43706); float32 state must survive."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Neumann([p], lr=0.1, warmup_steps=0, reset_steps=5)
    for key in ("iterate", "offset"):
        optimizer.state[p][key] = torch.rand(4) / 3
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for key in ("iterate", "offset"):
        assert optimizer.state[p][key].dtype == torch.float32
        assert torch.equal(optimizer.state[p][key], saved["state"][0][key])
    assert optimizer.state[p]["distance_squared"].dtype == torch.float64
    assert optimizer.state[p]["step"].dtype == torch.int64


def test_loaded_scalars_are_shared_again():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for key, value in entry.items():
            entry[key] = value.clone()
    optimizer.load_state_dict(saved)
    for key in ("step", "distance_squared", "skipped", "momentum"):
        assert len({id(state[key]) for state in optimizer.state.values()}) == 1
    train(model, optimizer, 1, start=6)
    assert {int(state["step"]) for state in optimizer.state.values()} == {7}


def test_an_older_state_dict_gets_defaults():
    model, optimizer = model_and_optimizer(**STRONG)
    train(model, optimizer, 10)
    saved = copy.deepcopy(optimizer.state_dict())
    full = copy.deepcopy(saved)
    for entry in saved["state"].values():
        for key in ("skipped", "distance_squared", "momentum"):
            del entry[key]
    for key in ("bounded", "maximize", "skip_nonfinite", "training"):
        del saved["param_groups"][0][key]
    other_model, other = model_and_optimizer(**STRONG)
    other.load_state_dict(saved)
    assert other.param_groups[0]["bounded"] is True
    assert other.training
    found, wanted = other.diagnostics().as_dict(), optimizer.diagnostics().as_dict()
    assert found.pop("groups")[0] == pytest.approx(wanted.pop("groups")[0])
    assert found == pytest.approx(wanted)
    del full["state"][0]["offset"]
    other.load_state_dict(full)
    other_model.load_state_dict(model.state_dict())
    train(other_model, other, 2, start=10)
    full["state"] = {}
    other.load_state_dict(full)
    assert other.diagnostics().step == 0
    train(other_model, other, 2)


def test_a_state_dict_of_another_model_is_refused():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    good = optimizer.state_dict()
    before = optimizer.diagnostics().as_dict()

    def refused(saved, message):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert optimizer.diagnostics().as_dict() == before

    wide = nn.Linear(5, 9)
    other = Neumann(
        [wide.weight, wide.bias, *nn.Linear(9, 3).parameters()], 0.1, warmup_steps=3, reset_steps=4
    )
    refused(other.state_dict(), r"0\.weight has shape \(8, 5\), its iterate .* \(9, 5\)")
    few = Neumann(wide.parameters(), 0.1, warmup_steps=3, reset_steps=4)
    refused(few.state_dict(), "group 0 has 2 parameters in the state dict and 4 in the optimizer")
    two = Neumann([{"params": [p]} for p in wide.parameters()], 0.1, warmup_steps=3, reset_steps=4)
    refused(two.state_dict(), "has 2 parameter groups, the optimizer 1")
    names = copy.deepcopy(good)
    names["param_groups"][0]["param_names"] = ["2.bias", "0.bias", "2.weight", "0.weight"]
    refused(names, "other parameters in another order: number 0 is '2.bias'")
    names["param_groups"][0]["param_names"] = ["a.weight", "a.bias", "b.weight", "b.bias"]
    refused(names, "other parameters: number 0 is 'a.weight' in the state dict and '0.weight'")
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    refused(sgd.state_dict(), "another optimizer: it has none of Neumann's options")
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    refused(adam.state_dict(), "another optimizer: its state holds .*exp_avg")
    headless = copy.deepcopy(good)
    headless["param_groups"][0]["training"] = False
    refused(headless, "saved in evaluation mode, but .* the training weights of 0.weight")


def test_names_of_wrappers_do_not_matter():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    saved = copy.deepcopy(optimizer.state_dict())
    names = saved["param_groups"][0]["param_names"]
    for wrapper in ("module._orig_mod.", "_checkpoint_wrapped_module."):
        saved["param_groups"][0]["param_names"] = [wrapper + name for name in names]
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.diagnostics().step == 6


@pytest.mark.parametrize("model_first", [True, False])
def test_a_parameter_thawed_between_saving_and_loading_in_evaluation_mode(model_first):
    model, _ = model_and_optimizer()
    model[0].requires_grad_(False)
    optimizer = Neumann(model.named_parameters(), lr=0.1, warmup_steps=3, reset_steps=4)
    train(model, optimizer, 7)
    optimizer.eval()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fresh, other = model_and_optimizer()
    with torch.no_grad():
        fresh[0].weight.add_(1)
    for part, state in list(zip((fresh, other), saved, strict=True))[:: 1 if model_first else -1]:
        part.load_state_dict(state)
    other.train()
    assert torch.equal(fresh[0].weight, saved[0]["0.weight"])


def test_loaded_state_has_the_layout_of_the_parameter():
    p = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = Neumann([p], lr=0.1, warmup_steps=0, reset_steps=0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["iterate"] = torch.randn(2, 3, 4, 4)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["iterate"].stride() == p.stride()
    assert torch.equal(optimizer.state[p]["iterate"], saved["state"][0]["iterate"])


def test_load_hooks_of_the_user_are_called():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 6)
    saved = copy.deepcopy(optimizer.state_dict())
    other_model, other = model_and_optimizer()
    seen = []

    def rename(_, loaded):
        loaded["param_groups"][0]["lr"] = 0.7
        return loaded

    other.register_load_state_dict_pre_hook(rename)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.diagnostics().step))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.7
    assert seen == [6]
    train(other_model, other, 1, start=6)
