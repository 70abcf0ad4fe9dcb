"""Which parts of a model are heads beside each other, and which lists hold whole networks."""

import pytest
from torch import nn

from tests.support.role_models import list_outputs


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
    assert list_outputs(Tasks(**parts)) == [f"{name}.weight" for name in expected]


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
    assert list_outputs(Tasks(**parts)) == ["last.weight"]


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
    assert list_outputs(nn.ModuleList([block() for _ in range(3)])) == []


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_inputs_or_outputs():
    empty = nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 4))
    other = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 5))
    assert list_outputs(Tasks(empty=empty, other=other)) == ["other.1.weight"]
    networks = [nn.Sequential(nn.Linear(0, 8), nn.Linear(8, 5)) for _ in range(2)]
    assert list_outputs(nn.ModuleList(networks)) == []


def test_the_branches_of_a_block_are_no_heads():
    """The first of a block's layers may take as many inputs as the head, its last is inside."""
    block = nn.ModuleDict({"one": nn.Linear(16, 9), "two": nn.Linear(16, 7)})
    assert list_outputs(Tasks(mixed=block, fc=nn.Linear(16, 3))) == ["fc.weight"]


class Activated(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.function = nn.ReLU()


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_a_narrow_last_block_holds_the_outputs(container):
    sizes = [(6, 8), (8, 8), (8, 3)]
    assert list_outputs(container([Activated(*size) for size in sizes])) == ["2.linear.weight"]
    assert list_outputs(container([Activated(*size) for size in sizes[:2]])) == []
    widening = [(3, 8), (8, 16), (16, 32)]
    assert list_outputs(container([Activated(*size) for size in widening])) == []  # features


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.rnn = nn.GRU(4, 8)
        self.head = nn.Linear(8, 11)


def test_every_network_in_a_list_has_its_own():
    perceptrons = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    assert list_outputs(nn.ModuleList(perceptrons)) == ["0.2.weight", "1.2.weight"]
    ensemble = nn.ModuleDict({"members": nn.ModuleList(perceptrons)})
    assert list_outputs(ensemble) == ["members.0.2.weight", "members.1.2.weight"]
    models = nn.ModuleList([Recurrent(), Recurrent()])
    assert list_outputs(models) == ["0.head.weight", "1.head.weight"]
    experts = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)]
    assert list_outputs(nn.ModuleList(experts)) == []  # could follow one another
