"""Which role each parameter has, and what happens where none fits."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from neumann.optim.roles import find_roles
from tests.support.role_models import LSTMModel, Network
from tests.support.role_tables import check_table, format_roles


def roles(model, **options):
    return {one.name: one.role for one in find_roles(model, **options)}


class Holder(nn.Module):
    """Has the parameters that it is given, and two layers."""

    def __init__(self, **parameters):
        super().__init__()
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))
        self.inner = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)


def test_the_table_of_a_transformer():
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 24}
    check_table("nn_transformer", find_roles(nn.Transformer(16, 4, **sizes, batch_first=True)))


def test_the_table_of_an_lstm():
    check_table("lstm", find_roles(LSTMModel()))


def test_a_line_stands_for_equal_layers_alone():
    """A table must not hide that one of many layers differs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    def lines(**options):
        return [line.split() for line in format_roles(find_roles(model, **options)).splitlines()]

    assert ["hidden", "1.weight", "4×4"] in lines()
    assert ["output", "2.weight", "2×4"] in lines()
    assert ["vector", "*.bias", "(3)", "*"] in lines()
    assert ["hidden", "*.weight", "(3)", "*×4"] in lines(overrides={"*.weight": "hidden"})


# ------------------------------------------------------------------ types


def test_the_order_is_that_of_the_model():
    model = Network()
    assert list(roles(model)) == [name for name, _ in model.named_parameters()]
    found = find_roles(model)
    assert [one.parameter for one in found] == list(model.parameters())


def test_a_tied_weight_is_one_embedding():
    model = Network()
    model.head.weight = model.embed.weight
    found = roles(model)
    assert found["embed.weight"] == "embedding"
    assert "head.weight" not in found
    assert found["head.bias"] == "vector"


def test_a_tied_weight_is_an_embedding_if_the_output_comes_first():
    model = nn.ModuleDict({"head": nn.Linear(8, 11), "embed": nn.Embedding(11, 8)})
    model["embed"].weight = model["head"].weight
    assert roles(model) == {"head.weight": "embedding", "head.bias": "vector"}


def test_a_module_that_is_used_twice_appears_once():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2))
    assert list(roles(model)) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_frozen_parameters_are_listed():
    model = Network()
    model.embed.requires_grad_(False)
    found = roles(model, overrides={"blocks.0.*": "frozen"})
    assert found["embed.weight"] == found["blocks.0.qkv.weight"] == "frozen"
    assert found["blocks.1.qkv.weight"] == "hidden"
    assert len(found) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("layer", "role"),
    [
        (nn.EmbeddingBag(5, 4), "embedding"),
        (nn.Embedding(1, 4), "embedding"),
        (nn.LayerNorm((3, 4)), "vector"),
        (nn.BatchNorm2d(4), "vector"),
        (nn.PReLU(4), "vector"),
        (nn.Linear(1, 4), "vector"),
        (nn.Bilinear(3, 4, 5), "hidden"),
        (nn.GRUCell(3, 4), "hidden"),
        (nn.ConvTranspose1d(4, 6, 3), "hidden"),
    ],
)
def test_types(layer, role):
    found = roles(nn.Sequential(layer, nn.Linear(4, 2)))
    assert found["0.weight" if "0.weight" in found else "0.weight_ih"] == role
    assert {role for name, role in found.items() if "bias" in name} == {"vector"}


def test_an_embedding_of_another_library():
    class QuantEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(11, 8))
            self.cls_token = nn.Parameter(torch.zeros(1, 8))

    model = nn.ModuleDict({"embed": QuantEmbedding(), "head": nn.Linear(8, 11)})
    model["head"].weight = model["embed"].weight
    assert roles(model) == {
        "embed.weight": "embedding",
        "embed.cls_token": "vector",
        "head.bias": "vector",
    }


def test_a_linear_layer_with_norm_in_its_name_is_a_matrix():
    class NormalizedLinear(nn.Linear):
        pass

    class ScaledNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 4))  # of each head

    found = roles(nn.Sequential(NormalizedLinear(4, 4), ScaledNorm(), nn.Linear(4, 2)))
    assert found["0.weight"] == "hidden"
    assert found["1.weight"] == "vector"


@pytest.mark.parametrize("out", [1, 3])
def test_the_output_layer_may_have_one_output(out):
    found = roles(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, out)))
    assert found == {
        "0.weight": "hidden",
        "0.bias": "vector",
        "2.weight": "output",
        "2.bias": "vector",
    }


# ------------------------------------------------------------------ parametrized weights


def test_weight_norm():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for layer in model:
        parametrizations.weight_norm(layer)
    magnitude, direction = (f"parametrizations.weight.original{i}" for i in (0, 1))
    assert roles(model) == {
        "0.bias": "vector",
        f"0.{magnitude}": "vector",
        f"0.{direction}": "hidden",
        "1.bias": "vector",
        f"1.{magnitude}": "vector",
        f"1.{direction}": "output",
    }


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_as_it_was():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    for layer in model:
        nn.utils.weight_norm(layer)
    found = roles(model)
    assert found["0.weight_v"] == "hidden"
    assert found["1.weight_v"] == "output"
    assert found["0.weight_g"] == found["1.weight_g"] == "vector"


def test_pruned_weights():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    for layer in model:
        prune.identity(layer, "weight")
    found = roles(model)
    assert [found[f"{i}.weight_orig"] for i in range(3)] == ["embedding", "hidden", "output"]


def test_a_parametrization_with_parameters():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, 3))

        def forward(self, weight):
            return weight * self.scale.mean()

    model = nn.Linear(4, 3)
    parametrize.register_parametrization(model, "weight", Scaled())
    found = roles(model)
    assert found["parametrizations.weight.original"] == "output"
    assert found["parametrizations.weight.0.scale"] == "vector"


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("pos_embed", "embedding"),
        ("patch_pos", "embedding"),
        ("height_rel", "embedding"),
        ("reg_token", "embedding"),
        ("relative_position_bias_table", "embedding"),
        ("codevectors", "embedding"),
        ("latents", "embedding"),
        ("attention_biases", "vector"),
        ("pos_bias_u", "vector"),
        ("layer_scale", "vector"),
        ("A_log", "vector"),
        ("w1", "hidden"),
        ("gate_up_proj", "hidden"),
        ("lora_A", "hidden"),
        ("text_projection", "hidden"),
    ],
)
def test_names(name, role):
    assert roles(Holder(**{name: (3, 4)}))[name] == role


def test_a_parameter_with_one_long_dimension_is_a_vector():
    found = roles(Holder(cls_token=(1, 1, 4), temperature=(3, 1, 1), whatever=(4,), scalar=()))
    assert [found[name] for name in ("cls_token", "temperature", "whatever", "scalar")] == (
        ["vector"] * 4
    )


def test_a_list_of_parameters_is_known_by_its_own_name():
    model = Holder()
    model.experts = nn.ParameterList(torch.zeros(3, 4) for _ in range(2))
    model.positions = Holder()
    model.positions.weights = nn.ParameterList([torch.zeros(3, 4)])
    assert roles(model)["experts.1"] == "hidden"
    assert roles(model)["positions.weights.0"] == "embedding"


def test_a_parameter_that_fits_no_role():
    with pytest.raises(
        ValueError, match="mystery, of shape \\(3, 4\\) in a Holder, fits no role"
    ) as e:
        find_roles(Holder(mystery=(3, 4)))
    assert 'roles={"mystery": "hidden"}' in str(e.value)
    assert "\n" not in str(e.value)
    assert roles(Holder(mystery=(3, 4)), overrides={"mystery": "vector"})["mystery"] == "vector"


# ------------------------------------------------------------------ overrides


def test_patterns_override_types():
    found = roles(Network(), overrides={"*.qkv.weight": "output", "embed.*": "hidden"})
    assert found["blocks.0.qkv.weight"] == found["blocks.1.qkv.weight"] == "output"
    assert found["embed.weight"] == "hidden"
    assert found["blocks.0.proj.weight"] == "hidden"


def test_patterns_may_agree():
    found = roles(Network(), overrides={"head.*": "vector", "*.bias": "vector"})
    assert found["head.weight"] == found["head.bias"] == "vector"


def test_a_shared_weight_is_matched_by_each_of_its_names():
    model = nn.ModuleDict({"wte": nn.Embedding(16, 8), "lm_head": nn.Linear(8, 16, bias=False)})
    model["lm_head"].weight = model["wte"].weight
    assert roles(model, overrides={"lm_head.weight": "output"}) == {"wte.weight": "output"}


def test_a_name_with_brackets_is_matched_as_it_is():
    model = Holder(**{"a[0]": (3, 4)})
    assert roles(model, overrides={"a[0]": "vector"})["a[0]"] == "vector"


def test_an_override_does_not_make_a_weight_tied():
    layers = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 10))
    first, *_ = find_roles(layers, {"0.weight": "embedding"})
    assert (first.role, first.tied) == ("embedding", False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head.*": torch.zeros(2, 2)}, "roles['head.*'] must be one of 'hidden', "),
        (
            {"head.*": "outptu"},
            "roles['head.*'] must be one of 'hidden', 'embedding', 'output', 'vector', 'frozen', "
            "got 'outptu'",
        ),
        ({"head.*": None}, "roles['head.*'] must be one of 'hidden', "),
        (
            {"heads.*": "output"},
            "the pattern 'heads.*' in roles matches no parameter of pos, emb",
        ),
        (
            {"head.*": "output", "*.weight": "hidden"},
            "two patterns in roles disagree about head.weight: 'head.*' says 'output', '*.weight' "
            "says 'hidden'",
        ),
        (
            {"head.bias": "hidden"},
            "head.bias, of shape (11,), cannot be hidden: it is not a matrix",
        ),
        ({"*.norm.weight": "hidden"}, "blocks.0.norm.weight, of shape (8,), cannot be hidden"),
    ],
)
def test_bad_patterns(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        find_roles(Network(), overrides)
    assert "\n" not in str(e.value)


def test_arguments_of_other_types():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        find_roles([torch.zeros(2)])
    with pytest.raises(TypeError, match=r"roles must be a dict \{pattern: role\}, got \['head'"):
        find_roles(Network(), ["head"])


# ------------------------------------------------------------------ what cannot be trained


def test_meta_parameters():
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match=r"pos has no data yet .* materialize the model first"):
        find_roles(model)


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"0.weight has no data yet .* one forward pass"):
        find_roles(model)
    model(torch.zeros(1, 3))
    assert roles(model)["0.weight"] == "hidden"


def test_quantized_parameters():
    model = Network()
    packed = torch.zeros(24, 8, dtype=torch.int8)
    model.blocks[0].qkv.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match=r"blocks.0.qkv.weight is quantized \(torch.int8\)"):
        find_roles(model)
    found = roles(model, overrides={"blocks.0.qkv.weight": "frozen"})
    assert found["blocks.0.qkv.weight"] == "frozen"


def test_the_remedy_for_many_quantized_parameters():
    model = Network()
    for block in model.blocks:
        block.qkv.weight = nn.Parameter(block.qkv.weight.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="is quantized") as caught:
        find_roles(model)
    remedy = str(caught.value).rpartition("with roles=")[2]
    found = roles(model, overrides=eval(remedy, {"model": model, "torch": torch}))
    assert found["blocks.0.qkv.weight"] == found["blocks.1.qkv.weight"] == "frozen"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_that_torch_has_quantized():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    packed = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(ValueError, match=r"^1 is quantized \(Linear\) and has no parameters"):
        find_roles(packed)
