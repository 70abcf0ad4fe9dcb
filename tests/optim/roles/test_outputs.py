"""Which layers compute the outputs of a model."""

import copy

import pytest
import torch
from torch import nn

from neumann.optim.roles import find_roles
from neumann.optim.roles.outputs import find_outputs
from neumann.optim.roles.places import find_places
from tests.support.role_models import Block, list_outputs


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
    assert list_outputs(encoder) == []
    encoder.pooler = nn.Linear(8, 8)  # of BERT
    assert list_outputs(encoder) == []
    encoder.multi_modal_projector = nn.Linear(8, 6)  # from images to tokens
    assert list_outputs(encoder) == []
    encoder.classify = nn.Linear(8, 3)
    assert list_outputs(encoder) == ["classify.weight"]


def test_a_recurrent_encoder_has_none():
    model = nn.ModuleDict({"project": nn.Linear(3, 8), "rnn": nn.GRU(8, 8)})
    assert list_outputs(model) == []


def test_the_output_may_come_before_the_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(8, 11)
            self.blocks = nn.ModuleList([Block(), Block()])

    assert list_outputs(Model()) == ["lm_head.weight"]


def test_the_last_layer_may_be_a_convolution():
    generator = nn.Sequential(
        nn.Linear(4, 8), nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 3, 2)
    )
    assert list_outputs(generator) == ["2.weight"]
    assert list_outputs(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))) == [
        "2.weight"
    ]


def test_a_single_layer_is_the_output_layer():
    assert list_outputs(nn.Linear(3, 4)) == ["weight"]
    assert list_outputs(nn.Sequential(nn.Linear(3, 4))) == ["0.weight"]


class Teaching(nn.Module):
    """A network and a frozen copy of it, which comes last."""

    def __init__(self, network):
        super().__init__()
        self.student = network
        self.teacher = copy.deepcopy(network).requires_grad_(False)


def test_a_frozen_copy_does_not_hold_the_outputs():
    def make():
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))

    assert list_outputs(Teaching(make())) == ["student.2.weight"]
    inside = nn.ModuleDict({"agent": Teaching(make())})
    assert list_outputs(inside) == ["agent.student.2.weight"]


def test_a_frozen_output_layer_remains_one():
    """What is before it does not become an output layer, also if it has the same shape."""
    for inputs, classes in ((4, 2), (64, 64)):
        model = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))
        model[2].requires_grad_(False)
        assert list_outputs(model) == []
        assert list_outputs(nn.ModuleDict({"first": model[0], "last": model[2]})) == []
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    stages[1].requires_grad_(False)
    assert list_outputs(stages) == []


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

    assert list_outputs(Perceptron(5, 8, 8, 3)) == ["layers.2.weight"]
    assert list_outputs(Perceptron(8, 8, 8)) == []  # like the layers before it
    wrapped = Perceptron(5, 8, 3)
    wrapped.layers[1] = torch.compile(wrapped.layers[1], backend="eager")
    assert list_outputs(wrapped) == ["layers.1.weight"]


def name_heads(heads):
    return nn.ModuleDict(zip(("colour", "size"), heads, strict=True))


@pytest.mark.parametrize("container", [nn.ModuleList, name_heads])
def test_several_heads(container):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.heads = container([nn.Linear(8, 3), nn.Linear(8, 5)])

    assert len(list_outputs(Model())) == 2
    assert all(name.startswith("heads.") for name in list_outputs(Model()))


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
    assert list_outputs(Named(after=heads)) == ["policy_head.weight", "value_head.weight"]
    assert list_outputs(Named(before=heads)) == ["policy_head.weight", "value_head.weight"]
    perceptrons = [nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, n)) for n in (4, 1)]
    model = Named(after=dict(zip(("actor", "critic"), perceptrons, strict=True)))
    assert list_outputs(model) == ["actor.2.weight", "critic.2.weight"]


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
    assert list_outputs(model) == ["classifier.weight"]  # DistilBERT
    model = Named(before={"conv_head": nn.Conv2d(3, 8, 1)}, after={"fc": nn.Linear(8, 3)})
    assert list_outputs(model) == ["fc.weight"]  # EfficientNet
    embeddings = nn.ModuleDict({"visual_projection": nn.Linear(8, 8)})
    assert list_outputs(Named(before={"embeddings": embeddings})) == []  # VisualBERT


@pytest.mark.parametrize("name", ["qa_outputs", "seq_relationship"])
def test_outputs_of_bert_and_its_kin(name):
    assert list_outputs(Named(before={name: nn.Linear(8, 2)})) == [f"{name}.weight"]


def test_a_dictionary_of_layers():
    layers = {"first": nn.Linear(3, 8), "blocks": nn.ModuleList([Block(), Block()])}
    assert list_outputs(nn.ModuleDict(layers | {"last": nn.Linear(8, 5)})) == ["last.weight"]


def test_auxiliary_classifiers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 8, 3)
            self.classifier = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))
            self.aux_classifier = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1))

    assert list_outputs(Model()) == ["classifier.2.weight", "aux_classifier.2.weight"]


def test_a_classifier_may_be_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Linear(6, 5))
            self.classifier_distill = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5))
            self.blocks = nn.ModuleList([Block(), Block()])

    assert list_outputs(Model()) == ["classifier.2.weight", "classifier_distill.1.weight"]


def test_a_detector_has_several():
    class Predictor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.cls_score = nn.Linear(8, 5)
            self.bbox_pred = nn.Linear(8, 20)

    assert list_outputs(Predictor()) == ["cls_score.weight", "bbox_pred.weight"]


@pytest.mark.parametrize("method", ["get_output_embeddings", "get_classifier"])
def test_a_model_may_say(method):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.answer = nn.Linear(8, 5)
            self.other = nn.Linear(8, 5)

    setattr(Model, method, lambda self: self.answer)
    assert list_outputs(Model()) == ["answer.weight"]
    setattr(Model, method, lambda self: (self.answer, nn.Identity(), self.other))
    assert list_outputs(Model()) == ["answer.weight", "other.weight"]


def test_a_model_may_say_that_a_perceptron_computes_the_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.ModuleDict({"one": nn.Linear(8, 32), "two": nn.Linear(32, 5)})

        def get_classifier(self):
            return self.head

    assert list_outputs(Model()) == ["head.two.weight"]


def test_a_model_may_have_no_answer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

        def get_output_embeddings(self):
            return None

    model = Model()
    assert list_outputs(model) == ["last.weight"]
    model.get_classifier = nn.Identity  # timm without a classifier
    assert list_outputs(model) == []
    model.get_classifier = lambda required: None
    assert list_outputs(model) == ["last.weight"]
