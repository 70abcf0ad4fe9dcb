"""Which layers compute the outputs of a model."""

import copy

import pytest
import torch
from torch import nn

from neumann.optim.roles import find_roles
from neumann.optim.roles.outputs import find_outputs
from neumann.optim.roles.places import find_places
from tests.support.role_models import Block


def outputs(model):
    return [one.name for one in find_roles(model) if one.role == "output"]


class Encoder(nn.Module):
    """Has no output layer: the last is one of many."""

    def __init__(self, blocks):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2)
        self.blocks = blocks
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_an_encoder_has_none(container):
    encoder = Encoder(container([Block(), Block()]))
    assert outputs(encoder) == []
    encoder.pooler = nn.Linear(8, 8)  # of BERT
    assert outputs(encoder) == []
    encoder.multi_modal_projector = nn.Linear(8, 6)  # from images to tokens
    assert outputs(encoder) == []
    encoder.classify = nn.Linear(8, 3)
    assert outputs(encoder) == ["classify.weight"]


def test_a_recurrent_encoder_has_none():
    model = nn.ModuleDict({"project": nn.Linear(3, 8), "rnn": nn.GRU(8, 8)})
    assert outputs(model) == []


def test_the_output_may_come_before_the_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(8, 11)
            self.blocks = nn.ModuleList([Block(), Block()])

    assert outputs(Model()) == ["lm_head.weight"]


def test_the_last_layer_may_be_a_convolution():
    generator = nn.Sequential(
        nn.Linear(4, 8), nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 3, 2)
    )
    assert outputs(generator) == ["2.weight"]
    assert outputs(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))) == ["2.weight"]


def test_a_single_layer_is_the_output_layer():
    assert outputs(nn.Linear(3, 4)) == ["weight"]
    assert outputs(nn.Sequential(nn.Linear(3, 4))) == ["0.weight"]


class Teaching(nn.Module):
    """A network and a frozen copy of it, which comes last."""

    def __init__(self, network):
        super().__init__()
        self.student = network
        self.teacher = copy.deepcopy(network).requires_grad_(False)


def test_a_frozen_copy_does_not_hold_the_outputs():
    def make():
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))

    assert outputs(Teaching(make())) == ["student.2.weight"]
    inside = nn.ModuleDict({"agent": Teaching(make())})
    assert outputs(inside) == ["agent.student.2.weight"]


def test_a_frozen_output_layer_remains_one():
    """What is before it does not become an output layer, also if it has the same shape."""
    for inputs, classes in ((4, 2), (64, 64)):
        model = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))
        model[2].requires_grad_(False)
        assert outputs(model) == []
        assert outputs(nn.ModuleDict({"first": model[0], "last": model[2]})) == []
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    stages[1].requires_grad_(False)
    assert outputs(stages) == []


@pytest.mark.parametrize("name", ["levit_128s", "repvit_m0_9", "vit_base_patch16_siglip_224"])
def test_a_wrapper_is_asked_for_what_it_holds(name):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        network = timm.create_model(name)
    found = find_outputs(list(find_places(network)))
    wrapped = nn.ModuleDict({"model": network, "loss": nn.CrossEntropyLoss()})
    assert find_outputs(list(find_places(wrapped))) == found


def test_layers_in_a_list():
    class Perceptron(nn.Module):
        def __init__(self, *sizes):
            super().__init__()
            self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    assert outputs(Perceptron(5, 8, 8, 3)) == ["layers.2.weight"]
    assert outputs(Perceptron(8, 8, 8)) == []  # like the layers before it
    wrapped = Perceptron(5, 8, 3)
    wrapped.layers[1] = torch.compile(wrapped.layers[1], backend="eager")
    assert outputs(wrapped) == ["layers.1.weight"]


def name_heads(heads):
    return nn.ModuleDict(zip(("colour", "size"), heads, strict=True))


@pytest.mark.parametrize("container", [nn.ModuleList, name_heads])
def test_several_heads(container):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.heads = container([nn.Linear(8, 3), nn.Linear(8, 5)])

    assert len(outputs(Model())) == 2
    assert all(name.startswith("heads.") for name in outputs(Model()))


class Named(nn.Module):
    """Has a body, and layers with the given names before it or after it."""

    def __init__(self, *, before=None, after=None):
        super().__init__()
        for name, layer in (before or {}).items():
            self.add_module(name, layer)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        for name, layer in (after or {}).items():
            self.add_module(name, layer)


def test_heads_beside_each_other():
    heads = {"policy_head": nn.Linear(8, 4), "value_head": nn.Linear(8, 1)}
    assert outputs(Named(after=heads)) == ["policy_head.weight", "value_head.weight"]
    assert outputs(Named(before=heads)) == ["policy_head.weight", "value_head.weight"]
    perceptrons = [nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, n)) for n in (4, 1)]
    model = Named(after=dict(zip(("actor", "critic"), perceptrons, strict=True)))
    assert outputs(model) == ["actor.2.weight", "critic.2.weight"]


class Tasks(nn.Module):
    """A body, and parts after it with the given names."""

    def __init__(self, **parts):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        for name, part in parts.items():
            self.add_module(name, part)


GATED = {"up": nn.Linear(16, 24), "back": nn.Linear(24, 16), "side": nn.Linear(16, 24)}


def make_head(outputs):
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, outputs))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"digit": nn.Linear(16, 10), "other": nn.Linear(16, 10)}, ["digit", "other"]),
        ({"pi": nn.Linear(16, 4), "v": nn.Linear(16, 1)}, ["pi", "v"]),
        ({"pi": make_head(4), "v": make_head(1)}, ["pi.2", "v.2"]),
        (
            {"mean": nn.Linear(16, 4), "drop": nn.Dropout(), "std": nn.Linear(16, 4)},
            ["mean", "std"],
        ),
        # What comes before the only head:
        ({"left": nn.Linear(16, 8), "right": nn.Linear(16, 8), "fc": nn.Linear(16, 3)}, ["fc"]),
        ({"squeeze": nn.Linear(16, 2), "up": nn.Linear(2, 16), "fc": nn.Linear(16, 3)}, ["fc"]),
        ({"attention": nn.Linear(16, 1), "fc": nn.Linear(16, 3)}, ["fc"]),
        ({"i2h": nn.Linear(16, 12), "i2o": nn.Linear(16, 3)}, ["i2o"]),
        ({"residual": nn.Linear(16, 16), "fc": nn.Linear(16, 3)}, ["fc"]),
        (
            {"layers": nn.ModuleList([nn.Linear(16, 8), nn.Linear(8, 9)]), "fc": nn.Linear(16, 3)},
            ["fc"],
        ),
        ({"gated": nn.ModuleDict(GATED), "fc": nn.Linear(16, 3)}, ["fc"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_heads_of_any_name(parts, expected):
    assert outputs(Tasks(**parts)) == [f"{name}.weight" for name in expected]


class Pair(nn.Module):
    """Two layers in a module of their own."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


@pytest.mark.parametrize(
    "parts",
    [
        {"norm_out": Pair(nn.Linear(16, 30), nn.LayerNorm(30)), "last": nn.Linear(16, 5)},
        {"modulation": nn.Sequential(nn.SiLU(), nn.Linear(16, 30)), "last": nn.Linear(16, 5)},
        {
            "grow": nn.Sequential(nn.Conv2d(16, 30, 3), nn.PixelShuffle(2)),
            "last": nn.Conv2d(16, 3, 3),
        },
        {"wx": nn.Linear(8, 64), "wh": nn.Linear(16, 64), "last": nn.Linear(16, 5)},
        {"film": nn.Linear(16, 32), "last": nn.Linear(16, 5)},
        {"one": nn.Linear(9, 10), "two": nn.Linear(16, 6), "last": nn.Linear(16, 5)},
        {"tower": nn.Linear(16, 8), "last": nn.Linear(16, 5)},
        {"V": nn.Linear(16, 1), "last": nn.Linear(16, 5)},
        {"cell": nn.Linear(16, 12), "last": nn.Linear(16, 5)},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_what_only_has_the_inputs_of_the_head_is_none(parts):
    assert outputs(Tasks(**parts)) == ["last.weight"]


@pytest.mark.parametrize(
    "block",
    [
        lambda: Pair(nn.Linear(4, 32), nn.Linear(32, 8)),  # a coupling: half of 8 to both halves
        lambda: nn.ModuleDict(
            {"up": nn.Linear(8, 24), "down": nn.Linear(24, 8), "side": nn.Linear(8, 24)}
        ),
        lambda: nn.ModuleDict(
            {"tokens": Pair(nn.Linear(5, 9), nn.Linear(9, 5)), "last": nn.Linear(8, 8)}
        ),
        lambda: Pair(nn.Conv1d(8, 16, 3), nn.GLU(1)),
    ],
    ids=["coupling", "gated", "mixer", "convolution"],
)
def test_blocks_in_a_list_are_no_networks(block):
    assert outputs(nn.ModuleList([block() for _ in range(3)])) == []


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_inputs_or_outputs():
    empty = nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 4))
    other = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 5))
    assert outputs(Tasks(empty=empty, other=other)) == ["other.1.weight"]
    networks = [nn.Sequential(nn.Linear(0, 8), nn.Linear(8, 5)) for _ in range(2)]
    assert outputs(nn.ModuleList(networks)) == []


def test_the_branches_of_a_block_are_no_heads():
    """The first of a block's layers may take as many inputs as the head, its last is inside."""
    block = nn.ModuleDict({"one": nn.Linear(16, 9), "two": nn.Linear(16, 7)})
    assert outputs(Tasks(mixed=block, fc=nn.Linear(16, 3))) == ["fc.weight"]


class Activated(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.function = nn.ReLU()


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_a_narrow_last_block_holds_the_outputs(container):
    sizes = [(6, 8), (8, 8), (8, 3)]
    assert outputs(container([Activated(*size) for size in sizes])) == ["2.linear.weight"]
    assert outputs(container([Activated(*size) for size in sizes[:2]])) == []
    widening = [(3, 8), (8, 16), (16, 32)]
    assert outputs(container([Activated(*size) for size in widening])) == []  # features


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.rnn = nn.GRU(4, 8)
        self.head = nn.Linear(8, 11)


def test_every_network_in_a_list_has_its_own():
    perceptrons = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    assert outputs(nn.ModuleList(perceptrons)) == ["0.2.weight", "1.2.weight"]
    ensemble = nn.ModuleDict({"members": nn.ModuleList(perceptrons)})
    assert outputs(ensemble) == ["members.0.2.weight", "members.1.2.weight"]
    models = nn.ModuleList([Recurrent(), Recurrent()])
    assert outputs(models) == ["0.head.weight", "1.head.weight"]
    experts = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)]
    assert outputs(nn.ModuleList(experts)) == []  # could follow one another


def test_heads_beside_each_other_follow_the_same_norm():
    found = find_roles(Named(after={"head": nn.Linear(8, 4), "head_dist": nn.Linear(8, 4)}))
    assert [one.normalized for one in found if one.role == "output"] == [True, True]


def test_a_norm_may_be_spelled_in_another_way():
    class RmsNorm(nn.LayerNorm):  # of timm
        pass

    found = find_roles(nn.Sequential(nn.Linear(4, 8), RmsNorm(8), nn.Linear(8, 3)))
    assert [one.normalized for one in found if one.role == "output"] == [True]


def test_names_of_layers_that_compute_no_outputs():
    model = Named(after={"pre_classifier": nn.Linear(8, 8), "classifier": nn.Linear(8, 3)})
    assert outputs(model) == ["classifier.weight"]  # DistilBERT
    model = Named(before={"conv_head": nn.Conv2d(3, 8, 1)}, after={"fc": nn.Linear(8, 3)})
    assert outputs(model) == ["fc.weight"]  # EfficientNet
    embeddings = nn.ModuleDict({"visual_projection": nn.Linear(8, 8)})
    assert outputs(Named(before={"embeddings": embeddings})) == []  # VisualBERT


@pytest.mark.parametrize("name", ["qa_outputs", "seq_relationship"])
def test_outputs_of_bert_and_its_kin(name):
    assert outputs(Named(before={name: nn.Linear(8, 2)})) == [f"{name}.weight"]


def test_a_dictionary_of_layers():
    layers = {"first": nn.Linear(3, 8), "blocks": nn.ModuleList([Block(), Block()])}
    assert outputs(nn.ModuleDict(layers | {"last": nn.Linear(8, 5)})) == ["last.weight"]


def test_auxiliary_classifiers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 8, 3)
            self.classifier = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))
            self.aux_classifier = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1))

    assert outputs(Model()) == ["classifier.2.weight", "aux_classifier.2.weight"]


def test_a_classifier_may_be_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Linear(6, 5))
            self.classifier_distill = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5))
            self.blocks = nn.ModuleList([Block(), Block()])

    assert outputs(Model()) == ["classifier.2.weight", "classifier_distill.1.weight"]


def test_a_detector_has_several():
    class Predictor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.cls_score = nn.Linear(8, 5)
            self.bbox_pred = nn.Linear(8, 20)

    assert outputs(Predictor()) == ["cls_score.weight", "bbox_pred.weight"]


@pytest.mark.parametrize("method", ["get_output_embeddings", "get_classifier"])
def test_a_model_may_say(method):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.answer = nn.Linear(8, 5)
            self.other = nn.Linear(8, 5)

    setattr(Model, method, lambda self: self.answer)
    assert outputs(Model()) == ["answer.weight"]
    setattr(Model, method, lambda self: (self.answer, nn.Identity(), self.other))
    assert outputs(Model()) == ["answer.weight", "other.weight"]


def test_a_model_may_say_that_a_perceptron_computes_the_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.ModuleDict({"one": nn.Linear(8, 32), "two": nn.Linear(32, 5)})

        def get_classifier(self):
            return self.head

    assert outputs(Model()) == ["head.two.weight"]


def test_a_model_may_have_no_answer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

        def get_output_embeddings(self):
            return None

    model = Model()
    assert outputs(model) == ["last.weight"]
    model.get_classifier = nn.Identity  # timm without a classifier
    assert outputs(model) == []
    model.get_classifier = lambda required: None
    assert outputs(model) == ["last.weight"]
