"""Ghost batches: all groups at once have the values of one group after the other."""

import copy

import pytest
import torch
from torch import nn

from neumann.lab.training.batchnorm_layers import normalize_groups, use_ghost_batches

SHAPES = {nn.BatchNorm1d: (5,), nn.BatchNorm2d: (5, 4, 3), nn.BatchNorm3d: (5, 2, 3, 2)}


def layers(kind, **options):
    """A layer with random weights, twice: for groups at once, and for one after the other."""
    torch.manual_seed(0)
    layer = kind(5, **options).double()
    for p in layer.parameters():
        nn.init.uniform_(p, -1, 2)
    return layer, copy.deepcopy(layer)


def compare(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
def test_groups_at_once_are_groups_one_by_one(kind, options):
    at_once, one_by_one = layers(kind, **options)
    for _ in range(2):
        inputs = torch.randn(12, *SHAPES[kind], dtype=torch.float64) * 3 + 1
        ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        found = normalize_groups(at_once, ours, 4)
        expected = torch.cat([one_by_one(group) for group in theirs.split(4)])
        compare(found, expected)
        weight = torch.randn_like(inputs)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        compare(ours.grad, theirs.grad)
        for p, q in zip(at_once.parameters(), one_by_one.parameters(), strict=True):
            compare(p.grad, q.grad)
    compare(at_once.state_dict(), one_by_one.state_dict())


def test_groups_at_once_keep_the_memory_format():
    layer, _ = layers(nn.BatchNorm2d)
    inputs = torch.randn(8, 5, 4, 3).double().to(memory_format=torch.channels_last)
    found = normalize_groups(layer, inputs, 4)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_groups_at_once_can_be_differentiated_twice():
    """The curvature of a run with ghost batches needs it."""
    layer, _ = layers(nn.BatchNorm2d)
    inputs = torch.randn(6, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: normalize_groups(layer, x, 3).pow(3), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_normalized_in_float32(dtype):
    layer, other = layers(nn.BatchNorm2d)
    layer, other = layer.float(), other.float()
    inputs = (torch.randn(8, 5, 4, 4) + 30).to(dtype)
    found = normalize_groups(layer, inputs, 4)
    assert found.dtype == dtype
    expected = torch.cat([other(group) for group in inputs.float().split(4)])
    compare(found.float(), expected, rtol=2e-2, atol=2e-2)
    compare(layer.running_mean, other.running_mean)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_network_normalizes_all_groups_at_once():
    """In as few operations for many groups as for few."""
    operations = []

    def record(graph, _):
        operations.append(len(graph.graph.nodes))
        return graph

    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    use_ghost_batches(network, 4)
    eager = copy.deepcopy(network)
    compiled = torch.compile(network, backend=record, dynamic=False)
    for size in (8, 32):
        inputs = torch.randn(size, 2, 6, 6)
        compare(compiled(inputs), eager(inputs))
    assert operations[0] == operations[1]
    compare(network.state_dict(), eager.state_dict())


@pytest.mark.usefixtures("fresh_compiler")
def test_many_runs_in_one_process_are_compiled_once():
    """Torch stops compiling after eight versions of a function, and says so in its log alone."""
    compiled = []

    def count(graph, _):
        compiled.append(graph)
        return graph

    for _ in range(10):
        network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        use_ghost_batches(network, 4)
        torch.compile(network, backend=count, dynamic=False)(torch.randn(8, 2, 6, 6))
    assert len(compiled) == 1


def test_a_ragged_last_group_is_a_group(monkeypatch):
    layer, other = layers(nn.BatchNorm1d)
    use_ghost_batches(nn.Sequential(layer), 4)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    inputs = torch.randn(10, 5, dtype=torch.float64)
    compare(layer(inputs), torch.cat([other(group) for group in inputs.split(4)]))


def test_what_a_layer_of_timm_does_besides(monkeypatch):
    timm = pytest.importorskip("timm.layers")
    layer = timm.BatchNormAct2d(5, act_layer=nn.SiLU)
    other = copy.deepcopy(layer)
    use_ghost_batches(nn.Sequential(layer), 4)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    inputs = torch.randn(12, 5, 2, 2)
    compare(layer(inputs), torch.cat([other(group) for group in inputs.split(4)]))
    compare(layer.state_dict(), other.state_dict())


class Doubled(nn.BatchNorm1d):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def test_a_layer_of_another_kind_keeps_its_own_forward_pass(monkeypatch):
    layer, other = Doubled(5), Doubled(5)
    use_ghost_batches(nn.Sequential(layer), 4)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    inputs = torch.randn(8, 5)
    compare(layer(inputs), torch.cat([other(group) for group in inputs.split(4)]))
