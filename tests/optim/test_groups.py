"""Parameter groups by role, and what a group's own preconditioner brings along."""

import dataclasses

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.groups import DEFAULTS, RoleOptions, default_options, param_groups
from neumann.optim.preconditioners import NAMED, Diagonal, Momentum, Spectral


class Network(nn.Module):
    """A little of everything: an embedding, fused attention, norms, and an output layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.unused = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x))


def take_steps(model, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_every_parameter_is_in_one_group():
    model = Network()
    groups = param_groups(model)
    named = [name for group in groups for name, _ in group["params"]]
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(named) == sorted(trainable)
    assert [a.name for a in groups.frozen] == ["unused"]
    kinds = {(g["role"], g["precondition"].name, g.get("weight_decay")) for g in groups}
    assert kinds == {
        ("hidden", "spectral", None),
        ("embedding", "diagonal", 0.0),
        ("output", "diagonal", None),
        ("vector", "diagonal", 0.0),
    }
    views = [g["precondition"].view.parts for g in groups if g["role"] == "hidden"]
    assert sorted(views) == [1, 3]


def test_the_table():
    shown = repr(param_groups(Network(), weight_decay=0.1))
    rows = [line.split("  ") for line in shown.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["role", "parameters", "shape", "P", "momentum", "decay", "scale"]
    fused = ["hidden", "layers.*.in_proj_weight (2)", "24 × 8", "spectral, 3 parts", "0.8", "0.1"]
    assert [*fused, "1.46"] in cells  # 8 matrices
    assert ["embedding", "embed.weight", "11 × 8", "diagonal", "0.8", "none", "0.1"] in cells
    assert ["output", "head.weight", "11 × 8", "diagonal", "0.8", "0.1", "5.62"] in cells
    assert cells[-1] == ["frozen", "unused", "3"]


def test_repeated_layers_are_one_row():
    stack = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    stack.encoder_layer_0, stack.encoder_layer_1 = nn.Linear(4, 4), nn.Linear(4, 4)
    shown = repr(param_groups(stack, roles={"*encoder*weight": "hidden"}))
    assert "*.weight (3)" in shown
    assert "encoder_layer_*.bias (2)" in shown


def test_options_of_a_role():
    options = {"output": RoleOptions(Diagonal(scale=0.4), decay=False, scale=0.5)}
    groups = param_groups(Network(), options=options, weight_decay=0.1)
    (output,) = (group for group in groups if group["role"] == "output")
    assert output["precondition"] == Diagonal(scale=0.2)
    assert output["weight_decay"] == 0.0
    hidden = [group["weight_decay"] for group in groups if group["role"] == "hidden"]
    assert hidden == [0.1, 0.1]
    assert param_groups(Network(), options={"vector": RoleOptions("diagonal", decay=False)})


@pytest.mark.parametrize(
    ("tokens", "classes", "p"),
    [(5, 8, "spectral"), (8, 8, "diagonal"), (5, 9, "diagonal"), (2, 2, "spectral")],
    ids=["classes", "tokens", "more outputs than inputs", "types"],
)
def test_an_output_layer_over_tokens_has_a_p_of_its_own(tokens, classes, p):
    """The options of a user hold for both."""
    model = nn.Sequential(nn.Embedding(tokens, 4), nn.Linear(4, 8), nn.Linear(8, classes))

    def find(**chosen):
        groups = param_groups(model, **chosen)
        return next(g["precondition"] for g in groups if g["role"] == "output")

    assert find().name == p
    assert find().scale == (12.0 if p == "spectral" else 45.0 / 8)
    given = {"output": RoleOptions("spectral", decay=True)}
    assert find(options=given).name == "spectral"
    twice = {"output": DEFAULTS["output"].scaled_by(2.0)}
    assert find(options=twice).scale == 2 * find().scale


def test_a_tied_embedding_takes_steps_by_the_number_of_features():
    """Twice the width, half the step: a score of the output layer changes by the same amount."""

    def find(width, tied):
        embedding, head = nn.Embedding(30, width), nn.Linear(width, 30, bias=False)
        if tied:
            head.weight = embedding.weight
        groups = param_groups(nn.Sequential(embedding, nn.Linear(width, width), head))
        (found,) = (g["precondition"].scale for g in groups if g["role"] == "embedding")
        return found

    assert find(38, tied=True) == 2 * find(76, tied=True) == 1.0
    assert find(38, tied=False) == find(76, tied=False) == 0.1


def test_an_output_layer_after_a_layer_norm_takes_smaller_steps():
    """Modules without parameters and containers in between do not count."""

    def find(*layers):
        groups = param_groups(nn.Sequential(nn.Linear(8, 8), *layers))
        return next(g["precondition"].scale for g in groups if g["role"] == "output")

    head = nn.Sequential(nn.Dropout(), nn.Linear(8, 4))
    assert find(head) == 12.0
    assert find(nn.LayerNorm(8), nn.Identity(), head) == 3.0
    assert find(nn.RMSNorm(8, elementwise_affine=False), head) == 3.0
    assert find(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), head) == 12.0
    assert find(nn.BatchNorm1d(8), nn.ReLU(), head) == 12.0


def test_a_network_with_batch_norms_has_less_momentum_before_p():
    """In every role, unless other options are given; a few norms are not enough."""

    def find(*layers, **chosen):
        groups = param_groups(nn.Sequential(*layers, nn.Linear(8, 4)), **chosen)
        return {group["role"]: group["precondition"].before for group in groups}

    roles = ("hidden", "output", "vector")
    block = [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)]
    assert find(*block) == dict.fromkeys(roles, Momentum(0.6))
    mostly_linear = (*block[:2], *map(nn.Linear, [8] * 4, [8] * 4))
    assert find(*mostly_linear) == dict.fromkeys(roles, Momentum(0.8))
    assert find(*block, options={"hidden": DEFAULTS["hidden"]})["hidden"] == Momentum(0.8)
    of_inputs = (nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert find(*of_inputs) == dict.fromkeys(roles, Momentum(0.8))


def test_default_options_of_a_model_can_be_changed():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))
    options = default_options(model)
    assert options["hidden"].precondition.before == Momentum(0.6)
    options["output"] = options["output"].scaled_by(2.0)
    before, after = (
        {group["role"]: group["precondition"] for group in param_groups(model, options=given)}
        for given in (None, options)
    )
    assert after["output"].scale == 2 * before["output"].scale
    assert after["hidden"] == before["hidden"]
    assert default_options(model)["output"].scale == 12.0


def test_options_with_another_momentum():
    output = DEFAULTS["output"].with_momentum(0.5)
    assert output.precondition.before == output.vocabulary.precondition.before == Momentum(0.5)
    assert output.scale == DEFAULTS["output"].scale
    named = RoleOptions("spectral", decay=True).with_momentum(0.5)
    assert named.precondition == Spectral(before=Momentum(0.5))


def test_experts_count_once_however_they_are_stored():
    """They are side by side, so what one changes does not add to what another changes."""

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = (nn.Parameter(torch.randn(64, 8, 8)) for _ in range(2))

    def find(experts):
        groups = param_groups(nn.ModuleDict({"experts": experts, "head": nn.Linear(8, 4)}))
        (hidden,) = (group for group in groups if group["role"] == "hidden")
        return hidden["precondition"].scale

    parts = ({name: nn.Linear(8, 8) for name in ("w1", "w2")} for _ in range(64))
    assert find(nn.ModuleList(map(nn.ModuleDict, parts))) == find(Stacked())


def test_hidden_matrices_of_deep_networks_take_smaller_steps():
    """By the fourth root of their number; fused projections count one by one."""

    def find(depth):
        fused = nn.MultiheadAttention(8, 2)  # four matrices: Q, K, V and the output projection
        layers = [nn.Linear(8, 8) for _ in range(depth - 4)]
        groups = param_groups(nn.Sequential(fused, *layers, nn.LayerNorm(8), nn.Linear(8, 4)))
        return [g["precondition"].scale for g in groups if g["role"] == "hidden"]

    assert find(36) == [1.0, 1.0]  # fused and plain
    assert find(9) == [pytest.approx(2**0.5)] * 2
    (one,) = param_groups(nn.Linear(8, 8), roles={"weight": "hidden"})[:1]
    assert one["precondition"].scale == pytest.approx(6**0.5)
    with pytest.raises(ValueError, match="depth must be None or an integer of at least 1, got 0"):
        RoleOptions("spectral", decay=True, depth=0)


def test_options_for_a_vocabulary_have_none_of_their_own():
    with pytest.raises(ValueError, match="without a `vocabulary` of its own"):
        RoleOptions("spectral", decay=True, vocabulary=DEFAULTS["output"])


def test_a_preconditioner_that_cannot_be_hashed():
    @dataclasses.dataclass  # not frozen
    class Halve:
        name = "halve"

        def elementwise(self, parameter):
            return True

        def create(self, parameter):
            return {}

        def apply(self, gradients, states):
            return [gradient / 2 for gradient in gradients]

    options = {"vector": RoleOptions(Halve(), decay=False)}
    groups = param_groups(Network(), options=options)
    assert len([group for group in groups if group["role"] == "vector"]) == 1


def test_a_scale_is_a_multiple_of_the_learning_rate():
    torch.manual_seed(0)
    starts = [nn.Linear(3, 4), nn.Linear(3, 4)]
    starts[1].load_state_dict(starts[0].state_dict())
    moves = []
    for model, scale in zip(starts, (1.0, 3.0), strict=True):
        hidden = RoleOptions(Spectral(), decay=False, scale=scale)
        before = model.weight.detach().clone()
        groups = param_groups(model, roles={"weight": "hidden"}, options={"hidden": hidden})
        optimizer = Neumann(groups, lr=0.01)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()  # a reset, which moves nothing
        optimizer.step()
        moves.append(model.weight.detach() - before)
    assert moves[0].abs().max() > 0
    torch.testing.assert_close(moves[1], 3 * moves[0])


def test_a_spectral_p_of_vectors_has_the_scale_of_the_role():
    vectors = RoleOptions("spectral", decay=False, scale=0.05)
    groups = param_groups(Network(), options={"vector": vectors})
    (found,) = {group["precondition"] for group in groups if group["role"] == "vector"}
    assert found.vectors.scale == pytest.approx(0.05 * NAMED["spectral"].vectors.scale)


def test_it_trains_and_resumes():
    torch.manual_seed(0)
    model = Network()
    optimizer = Neumann(param_groups(model), lr=0.02, weight_decay=0.01)
    first = take_steps(model, optimizer)
    torch.manual_seed(0)
    again = Network()
    resumed = Neumann(param_groups(again), lr=0.5)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert take_steps(model, optimizer) == take_steps(again, resumed) < first
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": {"head.*": "outptu"}}, "must be one of 'hidden', .*, got 'outptu'"),
        ({"roles": {"heads.*": "output"}}, "'heads.*' in roles matches no parameter"),
        ({"roles": {"head.*": "output", "*.weight": "hidden"}}, "disagree about head.weight"),
        ({"options": {"hiden": DEFAULTS["hidden"]}}, "a role in options must be one of"),
        ({"weight_decay": float("nan")}, "weight_decay must be None or a finite number"),
        ({"weight_decay": "0.1"}, "weight_decay must be None or a finite number"),
        ({"options": {"hidden": "spectral"}}, "must be a RoleOptions, got 'spectral'"),
        ({"split_heads": 1}, "split_heads must be True or False, got 1"),
        (
            {"options": {"vector": RoleOptions("diagonal", decay=True, per_input=True)}},
            "is not a matrix and has no inputs: leave per_input at False for its role, vector",
        ),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Network(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precondition": "spectrl", "decay": True},
            "one of 'diagonal', 'spectral', got 'spectrl'",
        ),
        ({"precondition": Momentum(), "decay": True, "scale": 2.0}, "has no scale of its own"),
    ],
)
def test_bad_options_of_a_role(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Network(), options={"vector": RoleOptions(**options)})


def test_a_model_without_matrices():
    with pytest.raises(ValueError, match="LayerNorm has no matrices to train: pass model"):
        param_groups(nn.LayerNorm(3))
    with pytest.raises(ValueError, match="ReLU has no parameters to train"):
        param_groups(nn.ReLU())


def test_vectors_of_a_batch_norm_take_larger_steps():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Flatten()
    )
    model += nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    groups = [group for group in param_groups(model) if group["role"] == "vector"]
    scales = {name: group["precondition"].scale for group in groups for name, _ in group["params"]}
    usual = scales["0.bias"]
    assert {name for name in scales if scales[name] != usual} == {
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }
    assert scales["1.bias"] == pytest.approx(3 * usual)
