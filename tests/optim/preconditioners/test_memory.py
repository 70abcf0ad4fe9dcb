"""What a preconditioner remembers: saved, loaded, refused, and replaced for another P."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import Diagonal, Momentum, Spectral, apply
from tests.support.preconditioned import CLOCK, FORMS, Signs, gradients, network, trained, weights


@pytest.mark.parametrize("name", ["diagonal", "spectral"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_resumed_run_has_the_same_bits(name, form):
    whole, _ = trained(12, precondition=name, **form)
    model, optimizer = trained(5, precondition=name, **form)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = network(seed=1)
    again.load_state_dict(saved[0])
    resumed = Neumann(again.named_parameters(), lr=0.5, precondition=name, **CLOCK, **form)
    resumed.load_state_dict(saved[1])
    trained(7, again, resumed, first=5)
    assert torch.equal(weights(again), weights(whole))


def test_a_state_dict_names_its_preconditioner():
    _, optimizer = trained(3, precondition="diagonal")
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["precondition"] == "diagonal"
    other = Neumann(network().named_parameters(), lr=0.01, **CLOCK)
    other.load_state_dict(saved)  # as every other option, it is adopted
    assert other.param_groups[0]["precondition"] == "diagonal"
    assert all("preconditioner_second_moment" in state for state in other.state.values())


def test_memory_is_float32_and_directions_have_the_dtype_of_the_gradient():
    model = network(dtype=torch.bfloat16)
    _, optimizer = trained(2, model=model, precondition="spectral")
    assert all(state["preconditioner_past"].dtype is torch.float32 for _, state in each(optimizer))
    (group,) = optimizer._store.gather(sharded=False, on_new_parameters=pytest.fail)
    found = apply.precondition_group(group, None, None).gradients
    assert {direction.dtype for direction in found} == {torch.bfloat16}


def each(optimizer):
    return list(optimizer.state.items())


def test_a_preconditioner_can_be_chosen_during_training():
    """New state is created, shared state is kept, and the rest is dropped."""
    model, optimizer = trained(3, warmup_steps=99)
    kept = {
        "diagonal": {"second_moment", "seen"},
        "spectral": {"past", "vector_second_moment", "vector_seen"},
        Spectral(before=None): {"vector_second_moment", "vector_seen"},
        Signs(): {"mean"},
        None: set(),
    }
    for number, (chosen, keys) in enumerate(kept.items(), start=3):
        optimizer.param_groups[0]["precondition"] = chosen
        before = weights(model).clone()
        trained(1, model, optimizer, first=number)
        found = {
            k.removeprefix("preconditioner_") for _, s in each(optimizer) for k in s if "_" in k
        }
        assert found & {k for some in kept.values() for k in some} == keys
        assert not torch.equal(weights(model), before)
    model, optimizer = trained(3, precondition="spectral")
    past = optimizer.state[model[0].weight]["preconditioner_past"].clone()
    optimizer.param_groups[0]["precondition"] = Momentum()
    gradients(model, 3)
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[model[0].weight]["preconditioner_past"], 0.6 * past + model[0].weight.grad
    )
    optimizer.param_groups[0]["precondition"] = "Spectral"
    with pytest.raises(ValueError, match="precondition must be None, one of"):
        trained(1, model, optimizer)


TWICE = Diagonal(before=Diagonal())  # both keep the same


def test_two_preconditioners_with_the_same_state_names_are_refused():
    message = "'diagonal' and one before it both keep 'second_moment'"
    with pytest.raises(ValueError, match=message):
        trained(1, precondition=TWICE)
    no_forces = {"cubic": 0.0, "repulsive": 0.0}
    model, optimizer = trained(3, **no_forces)
    late = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("late", late)], "precondition": TWICE})
    assert len(optimizer.param_groups) == 1
    assert late not in optimizer.state
    trained(3, model, optimizer, first=3)
    assert torch.equal(weights(model), weights(trained(6, **no_forces)[0]))


class MatrixSigns(Signs):
    def create(self, parameter):
        if parameter.ndim < 2:
            raise ValueError("signs are for matrices")
        return super().create(parameter)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("late", {"lr": -1.0}, "lr must be"),
        ("late", {"cubic": 1.0}, "cubic must agree"),
        ("first", {}, "more than one parameter group"),
        ("vector", {}, "signs are for matrices"),
    ],
)
def test_a_refused_group_leaves_no_trace(name, changes, message):
    """Neither in the state, nor in what it was made for: the next group has the same number."""
    shapes = {"first": (3, 4), "late": (4, 2), "vector": (3,)}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = Neumann([parameters["first"]], lr=0.1, precondition="spectral")
    before, made_for = copy.deepcopy(optimizer.state_dict()), [*optimizer._store.made_for]
    group = {"params": [parameters[name]], "precondition": MatrixSigns(), **changes}
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert optimizer._store.made_for == made_for == ["spectral"]
    late = parameters["late"]
    optimizer.add_param_group({"params": [late], "precondition": "diagonal"})
    optimizer.param_groups[1]["precondition"] = MatrixSigns()
    late.grad = torch.ones_like(late)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[late]["preconditioner_mean"], late.grad)


def test_state_of_another_shape_is_refused_and_changes_nothing():
    model, optimizer = trained(3, precondition="diagonal")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    saved["state"][1]["preconditioner_second_moment"] = torch.ones(1)
    message = r"needs preconditioner_second_moment of shape \(6,\), and the state dict has \(1,\)"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.01
    trained(3, model, optimizer, first=3)
    assert torch.equal(weights(model), weights(trained(6, precondition="diagonal")[0]))


def test_the_options_of_a_preconditioner_are_saved_with_its_name():
    """Those that the optimizer has been given now count; from a name alone they cannot be had."""
    own = Spectral(scale=1.0, before=Momentum(0.9))
    _, optimizer = trained(2, precondition=own)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["precondition"].startswith("spectral: Spectral(scale=1.0, ")
    same = Neumann(
        network().named_parameters(), lr=0.1, precondition=Spectral(1.0, before=Momentum(0.9))
    )
    same.load_state_dict(saved)
    assert same.param_groups[0]["precondition"] == own
    other = Neumann(network().named_parameters(), lr=0.1, precondition=Spectral(scale=0.5))
    with pytest.warns(
        UserWarning, match=r"group 0 was saved with .*scale=1.0.* continues with .*=0.5"
    ):
        other.load_state_dict(saved)
    assert other.param_groups[0]["precondition"].scale == 0.5
    for given in ("spectral", "diagonal", None):
        named = Neumann(network().named_parameters(), lr=0.1, precondition=given, **CLOCK)
        with pytest.raises(ValueError, match="build the optimizer with the saved"):
            named.load_state_dict(saved)


@pytest.mark.parametrize("saved_with", [None, "diagonal"])
def test_an_object_that_a_checkpoint_replaces_is_named(saved_with):
    """As all options, P comes from the checkpoint; an object could not be had back from there."""
    _, optimizer = trained(2, precondition=saved_with)
    other = Neumann(network().named_parameters(), lr=0.1, precondition=Signs(), **CLOCK)
    message = (
        f"saved with the preconditioner {saved_with!r} and the .* has 'signs'; it continues with"
    )
    with pytest.warns(UserWarning, match=f"{message} {saved_with!r}"):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["precondition"] == saved_with
