"""Where the matrices are: fused projections, experts, groups of convolutions."""

import pytest
import torch
from torch import nn

from neumann.optim.preconditioners.matrix_view import WHOLE, MatrixView
from neumann.optim.roles import find_roles
from tests.support.role_models import LSTMModel, Network


def views(model, **options):
    """The views by name of all hidden parameters, which fit their shapes."""
    found = [one for one in find_roles(model, **options) if one.role == "hidden"]
    for one in found:
        matrices = one.view.split(one.parameter)
        assert torch.equal(one.view.join(matrices, one.parameter), one.parameter)
    return {one.name: one.view for one in found}


class Module(nn.Module):
    """Has what it is given."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def view_in(path, *, split_heads=False, **attributes):
    """The view of the weight of one layer of a module, inside a model."""
    model = nn.ModuleDict({"module": Module(**attributes), "head": nn.Linear(4, 2)})
    found = views(model, split_heads=split_heads)
    name = f"module.{path}"
    return found[name if name in found else f"{name}.weight"]


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


# ------------------------------------------------------------------ attention


def test_attention():
    attention = nn.MultiheadAttention(8, 2)
    assert view_in("attention.in_proj_weight", attention=attention) == MatrixView(parts=3)
    by_head = view_in("attention.in_proj_weight", attention=attention, split_heads=True)
    assert by_head == MatrixView(parts=3, heads=2)
    apart = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    assert view_in("apart.k_proj_weight", apart=apart) == WHOLE


@pytest.mark.parametrize("name", ["qkv", "Wqkv", "to_qkv", "qkv_proj", "c_attn"])
def test_fused_attention(name):
    layers = {name: nn.Linear(8, 24), "proj": nn.Linear(8, 8), "num_heads": 4}
    assert view_in(name, **layers) == MatrixView(parts=3)
    assert view_in(name, **layers, split_heads=True) == MatrixView(parts=3, heads=4)


def test_attention_with_a_width_of_its_own():
    """The output projection shows how wide the values are."""
    layers = {"to_kv": nn.Linear(8, 12), "to_out": nn.Sequential(nn.Linear(6, 5))}
    assert view_in("to_kv", **layers) == MatrixView(parts=2)
    assert view_in("to_kv", to_kv=nn.Linear(8, 12)) == WHOLE  # latent keys, say
    wide = {"qkv": nn.Linear(8, 18), "proj": nn.Linear(6, 8)}
    assert view_in("qkv", **wide) == MatrixView(parts=3)


def test_fewer_keys_than_queries():
    heads = {"num_heads": 4, "num_key_value_heads": 2}
    layers = {"qkv_proj": nn.Linear(8, 16), "o_proj": nn.Linear(8, 8)}
    assert view_in("qkv_proj", **layers, **heads) == MatrixView(parts=(8, 4, 4))
    config = Module(num_attention_heads=4, num_key_value_heads=2)
    assert view_in("qkv_proj", **layers, config=config) == MatrixView(parts=(8, 4, 4))
    # Nothing says so: then it is what cross-attention has, keys and values.
    assert view_in("qkv_proj", **layers) == MatrixView(parts=2)


def test_keys_and_values_of_other_sizes():
    layers = {"in_proj_qkv": nn.Linear(8, 22), "out_proj": nn.Linear(12, 8)}
    sizes = {"key_dim": 5, "value_dim": 12}
    assert view_in("in_proj_qkv", **layers, **sizes) == MatrixView(parts=(5, 5, 12))


def test_heads_that_come_first_stay_whole():
    layers = {"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 8), "num_heads": 2}
    assert view_in("qkv", **layers, head_first=False) == MatrixView(parts=3)
    assert view_in("qkv", **layers, head_first=True) == WHOLE
    assert view_in("qkv", **layers, key_dim=4, val_dim=4) == WHOLE
    assert view_in("query_key_value", query_key_value=nn.Linear(8, 24)) == WHOLE


def test_heads_are_split_only_if_asked():
    assert views(Network())["blocks.0.qkv.weight"] == MatrixView(parts=3)
    found = views(Network(), split_heads=True)
    assert found["blocks.0.qkv.weight"] == MatrixView(parts=3, heads=2)
    assert found["blocks.0.proj.weight"] == WHOLE


# ------------------------------------------------------------------ gates


def test_gated_layers():
    two = MatrixView(parts=2)
    assert view_in("Wi", Wi=nn.Linear(8, 12), Wo=nn.Linear(6, 8)) == two
    gated = nn.Sequential(nn.Linear(8, 12), nn.GLU(), nn.Linear(6, 8))
    assert view_in("gated.0", gated=gated) == two
    adapted = {"down_proj": nn.Linear(6, 8), "adapter": nn.Linear(8, 8)}
    assert view_in("gate_up_proj", gate_up_proj=nn.Linear(8, 12), **adapted) == two


def test_layers_that_are_not_gated():
    assert view_in("fc1", fc1=nn.Linear(8, 12), fc2=nn.Linear(12, 8)) == WHOLE
    narrow = {"fc1": nn.Linear(4, 16), "fc2": nn.Linear(16, 8)}  # a block that doubles the width
    assert view_in("fc1", **narrow) == view_in("fc2", **narrow) == WHOLE
    between = {"first": nn.Linear(8, 12), "rnn": nn.LSTM(12, 6), "last": nn.Linear(6, 8)}
    assert view_in("first", **between) == WHOLE


# ------------------------------------------------------------------ experts


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_experts(transposed, apart):
    shapes = [(3, 8, 12), (3, 6, 8)] if transposed else [(3, 12, 8), (3, 8, 6)]
    weights = dict(zip(("gate_up_proj", "down_proj"), (parameter(*s) for s in shapes), strict=True))
    if not apart:
        weights["gate_up_proj_bias"] = parameter(3, 12)
    gates = MatrixView(stacked=True, transposed=transposed, parts=2 if apart else 1)
    assert view_in("gate_up_proj", **weights) == gates
    assert view_in("down_proj", **weights) == MatrixView(stacked=True, transposed=transposed)


def test_other_stacked_matrices():
    assert view_in("w1", w1=parameter(3, 6, 4)) == MatrixView(stacked=True)
    bilinear = nn.Bilinear(3, 4, 5)
    assert view_in("bilinear", bilinear=bilinear) == MatrixView(stacked=True)


# ------------------------------------------------------------------ convolutions and recurrence


@pytest.mark.parametrize(
    ("layer", "view"),
    [
        (nn.Conv2d(6, 4, 3), WHOLE),
        (nn.Conv2d(6, 4, 3, groups=2), MatrixView(groups=2)),
        (nn.Conv2d(6, 6, 3, groups=6), MatrixView(stacked=True)),
        (nn.Conv2d(6, 12, 3, groups=6), MatrixView(stacked=True)),
        (nn.Conv1d(6, 6, 3, groups=6), MatrixView(stacked=True)),
        (nn.ConvTranspose2d(6, 4, 3), MatrixView(transposed=True)),
        (nn.ConvTranspose2d(6, 4, 3, groups=2), MatrixView(transposed=True, groups=2)),
        (nn.ConvTranspose1d(6, 6, 3, groups=6), MatrixView(transposed=True, groups=6)),
    ],
)
def test_convolutions(layer, view):
    assert view_in("layer", layer=layer) == view


def test_recurrent_layers():
    found = views(LSTMModel())
    assert found["lstm.weight_ih_l1_reverse"] == MatrixView(parts=4)
    assert found["lstm.weight_hr_l0"] == WHOLE
    assert view_in("rnn.weight_hh_l0", rnn=nn.GRU(4, 5)) == MatrixView(parts=3)
    assert view_in("rnn.weight_hh_l0", rnn=nn.RNN(4, 5)) == WHOLE
    assert view_in("cell.weight_ih", cell=nn.LSTMCell(4, 5)) == MatrixView(parts=4)


def test_parametrized_layers():
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 4, 3, groups=2), dim=2)
    found = view_in("layer.parametrizations.weight.original1", layer=convolution)
    assert found == MatrixView(groups=2)
