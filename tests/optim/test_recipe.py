"""The recipe: three lines from a model to training, and one-line errors for bad input."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import neumann
from neumann.optim.groups import RoleOptions
from neumann.optim.preconditioners import Diagonal, Momentum, SlowMomentum
from neumann.optim.recipe import LR, add_slow_momentum, choose_weight_decay


class Network(nn.Module):
    """An embedding, a hidden layer, a norm and an output layer, of any width."""

    def __init__(self, width=8, classes=11):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embed(tokens)).relu()))


def make(width=8, classes=11):
    torch.manual_seed(0)
    return Network(width, classes)


def take_steps(model, optimizer, schedule, steps):
    generator = torch.Generator().manual_seed(1)
    rates = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (32,), generator=generator)
        loss = cross_entropy(model(tokens), (tokens + 1) % 11)
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return loss.item(), rates


def test_three_lines_train_a_model():
    model = make()
    optimizer, schedule = neumann.large_batch(model, steps=60)
    loss, rates = take_steps(model, optimizer, schedule, 60)
    assert loss < 0.5
    assert rates[0] == pytest.approx(LR / 2)  # two steps of ramp: 3 % of 60
    assert max(rates) == rates[1] == rates[2] == pytest.approx(LR)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert all(group["momentum"] == 0.6 for group in optimizer.param_groups)
    assert all(group["warmup_steps"] == 0 for group in optimizer.param_groups)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_rate_is_zero_after_the_last_step(steps):
    model = make()
    optimizer, schedule = neumann.large_batch(model, steps)
    _, rates = take_steps(model, optimizer, schedule, steps)
    assert min(rates) > 0
    assert optimizer.param_groups[0]["lr"] == 0


def test_optimizer_and_schedule_resume():
    model = make()
    optimizer, schedule = neumann.large_batch(model, steps=10)
    take_steps(model, optimizer, schedule, 4)
    other = copy.deepcopy(model)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    take_steps(model, optimizer, schedule, 6)
    again, rest = neumann.large_batch(other, steps=10)
    again.load_state_dict(saved[0])
    rest.load_state_dict(saved[1])
    take_steps(other, again, rest, 6)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_longer_run_says_which_length_counts():
    model = make()
    optimizer, schedule = neumann.large_batch(model, steps=4)
    take_steps(model, optimizer, schedule, 4)
    with pytest.warns(UserWarning, match="the learning rate has been 0 since step 4"):
        take_steps(model, optimizer, schedule, 2)
    _, longer = neumann.large_batch(model, steps=8)
    with pytest.warns(UserWarning, match="has 4 steps and this one was built for 8; it contin"):
        longer.load_state_dict(schedule.state_dict())


def test_layers_that_are_added_later_join_schedule_and_decay():
    """As the docs say: one group of `param_groups` at a time."""
    model = make()
    model.hidden.requires_grad_(False)
    optimizer, schedule = neumann.large_batch(model, steps=20)
    take_steps(model, optimizer, schedule, 10)
    model.hidden.requires_grad_(True)
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for group in neumann.param_groups(model):
        late = [(name, p) for name, p in group["params"] if p not in known]
        if late:
            optimizer.add_param_group({**group, "params": late})
    take_steps(model, optimizer, schedule, 5)
    decays = {group["role"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays["hidden"] == decays["output"] == choose_weight_decay(model, 20)
    assert decays["vector"] == 0
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


def test_an_output_layer_alone():
    """A linear probe: everything but the last layer is frozen."""
    model = make()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer, schedule = neumann.large_batch(model, steps=torch.tensor([10]).numpy()[0])
    assert {group["role"] for group in optimizer.param_groups} == {"output", "vector"}
    take_steps(model, optimizer, schedule, 3)


def test_a_misspelled_argument_suggests_the_right_one():
    with pytest.raises(
        TypeError, match=r"large_batch\(\) has no argument 'pwer': did you mean 'power'"
    ):
        neumann.large_batch(make(), steps=40, pwer=0.7)
    with pytest.raises(ValueError, match="power must be a finite number above 0"):
        neumann.large_batch(make(), steps=40, power=10**400)


def test_the_rate_may_fall_as_a_power():
    model = make()
    optimizer, schedule = neumann.large_batch(model, steps=40, ramp=0.0, power=0.5)
    _, rates = take_steps(model, optimizer, schedule, 40)
    assert rates[30] == pytest.approx(LR / 2)  # the root of a quarter
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_slow_momentum_goes_to_hidden_matrices():
    optimizer, _ = neumann.large_batch(make(), steps=200, slow_momentum=0.6)
    for group in optimizer.param_groups:
        expected = SlowMomentum(0.8, 0.98, 0.6, 60) if group["role"] == "hidden" else Momentum(0.8)
        assert group["precondition"].before == expected
    groups = neumann.param_groups(make())
    add_slow_momentum(groups, 400, 0.5)
    assert "0.8 and 0.99" in repr(groups)
    model = make()
    pair = neumann.large_batch(model, steps=60, slow_momentum=0.6)
    assert take_steps(model, *pair, 60)[0] < 0.5
    model = make()
    take_steps(model, *neumann.large_batch(model, steps=1, slow_momentum=1.0), 1)


def test_slow_momentum_needs_momentum():
    own = {"hidden": RoleOptions(Diagonal(), decay=True)}
    with pytest.raises(ValueError, match=r"slow_momentum=0\.6: the P of hidden matrices needs a"):
        neumann.large_batch(make(), steps=40, slow_momentum=0.6, options=own)


def test_roles_options_and_options_of_the_optimizer_arrive():
    optimizer, schedule = neumann.large_batch(
        make(),
        steps=100,
        lr=0.5,
        weight_decay=0.25,
        ramp=0.1,
        roles={"head.weight": "hidden"},
        options={"vector": RoleOptions(Diagonal(), decay=False, scale=0.5)},
        momentum=0.3,
        state_dtype=torch.bfloat16,
    )
    groups = {group["role"]: group for group in optimizer.param_groups}
    assert set(groups) == {"hidden", "embedding", "vector"}
    assert groups["hidden"]["weight_decay"] == 0.25
    assert groups["embedding"]["weight_decay"] == 0
    assert groups["vector"]["precondition"].scale == 0.1
    assert {group["momentum"] for group in optimizer.param_groups} == {0.3}
    assert groups["hidden"]["state_dtype"] is torch.bfloat16
    assert (schedule.total_steps, schedule.ramp_steps) == (100, 10)


def test_weight_decay_follows_from_lr_and_steps():
    model = make()
    for lr, steps in ((0.03, 100), (0.06, 100), (0.03, 1_000)):
        optimizer, _ = neumann.large_batch(model, steps=steps, lr=lr)
        (hidden,) = (group for group in optimizer.param_groups if group["role"] == "hidden")
        assert lr * hidden["weight_decay"] * steps == pytest.approx(2.5)
    convolutions = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)]
    image = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8, 4))
    assert 0.03 * choose_weight_decay(image, 200) * 200 == pytest.approx(10.0)
    mixed = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), *map(nn.Linear, [8] * 4, [8] * 4))
    assert 0.03 * choose_weight_decay(mixed, 100) * 100 == pytest.approx(2.5)
    frozen = {f"{layer}.weight": "frozen" for layer in range(2, 5)}  # what is left has a norm
    optimizer, _ = neumann.large_batch(mixed, steps=100, roles=frozen)
    assert optimizer.param_groups[0]["weight_decay"] == choose_weight_decay(
        mixed, 100, roles=frozen
    )
    assert 0.03 * optimizer.param_groups[0]["weight_decay"] * 100 == pytest.approx(7.5)
    assert choose_weight_decay(model, steps=1, lr=0.5) == pytest.approx(0.15)  # 7.5 % per step
    assert choose_weight_decay(model, steps=10, lr=0.0) == 0.0
    assert choose_weight_decay(model, 100, torch.tensor(0.03)) == pytest.approx(2.5 / 3)


def test_an_output_layer_changes_its_scores_alike_at_every_width():
    """Inputs of size 1 and the same gradient move a score by the same amount."""
    found = []
    for width in (8, 64):
        model = make(width, classes=200)
        optimizer, _ = neumann.large_batch(model, steps=10, ramp=0.0, weight_decay=0.0)
        model.head.weight.grad = torch.ones_like(model.head.weight)
        before = model.head.weight.detach().clone()
        optimizer.step()  # the reset of the series moves nothing
        optimizer.step()
        moved = (model.head.weight - before) @ torch.ones(2 * width)
        found.append(moved.mean().item())
    assert found[0] == pytest.approx(found[1])
    assert -10 * LR * 45 < found[0] < -LR * 45  # the series amplifies lr · scale


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"steps": 2.5}, "steps must be an integer of at least 1, got 2.5"),
        ({"steps": 10, "lr": "fast"}, "lr must be a finite number"),
        ({"steps": 10, "lr": float("nan")}, "lr must be a finite number"),
        ({"steps": 10, "lr": -1.0}, "lr must be a finite number"),
        ({"steps": 10, "lr": torch.ones(2)}, "lr must be a finite number"),
        ({"steps": 10, "lr": torch.ones(3, 3)}, "lr must be a finite number"),
        ({"steps": 10, "lr": torch.tensor(1j)}, "lr must be a finite number"),
        ({"steps": 10, "lr": torch.tensor(True)}, "lr must be a finite number"),
        ({"steps": 10, "lr": nn.Sequential(nn.Linear(2, 2))}, "lr must be a finite number"),
        ({"steps": torch.ones(3, 3)}, "steps must be an integer"),
        ({"steps": 10, "weight_decay": np.ones(2)}, 'weight_decay must be "auto" or a'),
        ({"steps": 10, "weight_decay": float("inf")}, 'weight_decay must be "auto" or a'),
        ({"steps": 10, "weight_decay": "much"}, 'weight_decay must be "auto" or a finite number'),
        ({"steps": 10, "weight_decay": None}, 'weight_decay must be "auto" or a finite number'),
        ({"steps": 10, "precondition": "diagonal"}, "each role has a preconditioner of its own"),
        ({"steps": 10, "ramp": 1.0}, "ramp must be a share of the steps, from 0 to below 1"),
        ({"steps": 10, "power": 0}, "power must be a finite number above 0"),
        ({"steps": 10, "power": None}, "power must be a finite number above 0"),
        (
            {"steps": 10, "slow_momentum": 1.5},
            "slow_momentum must be a share, from 0 to 1, got 1.5",
        ),
        ({"steps": 10, "slow_momentum": None}, "slow_momentum must be a share, from 0 to 1"),
        ({"steps": 10, "roles": {"nothing.*": "hidden"}}, "'nothing.*' in roles matches no"),
        ({"steps": 10, "roles": {"head.*": "middle"}}, "must be one of 'hidden'"),
        ({"steps": 10, "roles": {"head.*": "output"}}, "cannot be output: it is not a matrix"),
        (
            {"steps": 10, "roles": {"head.w*": "hidden", "*.weight": "vector"}},
            "two patterns in roles disagree about head.weight",
        ),
    ],
)
def test_bad_input_gets_one_line(arguments, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        neumann.large_batch(model, **arguments)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


def test_models_that_cannot_be_trained():
    with pytest.raises(ValueError, match="LayerNorm has no matrices to train"):
        neumann.large_batch(nn.LayerNorm(3), steps=10)
    with pytest.raises(ValueError, match="Network has no parameters to train: unfreeze some"):
        neumann.large_batch(make().requires_grad_(False), steps=10)
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match="has no data yet"):
        neumann.large_batch(model, steps=10)
