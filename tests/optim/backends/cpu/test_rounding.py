"""How the CPU kernel rounds: to nearest, and stochastically."""

import pytest
import torch

pytest.importorskip("numba")

from neumann.optim.backends.cpu import numba_pass
from neumann.optim.phases import Coefficients
from neumann.optim.tensors import Tensors
from tests.support.cpu_passes import (
    BF16,
    COEFFICIENTS,
    F32,
    F64,
    FORCE,
    bits,
    copy_of,
    run_pass,
    tensors_of,
)


def test_nearest_is_what_torch_does():
    """m ← −g, so that the state is the gradient rounded: any bit pattern, and every tie."""
    patterns = torch.randint(-(2**31), 2**31, (300_000,)).to(torch.int32)
    ties = (torch.arange(2**16) << 16 | 0x8000).to(torch.int32)
    special = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 1, 0])
    gradient = torch.cat([patterns, ties, special.to(torch.int32)]).view(F32)
    tensors = Tensors(
        [torch.zeros_like(gradient)],
        [gradient],
        [torch.zeros_like(gradient, dtype=BF16)],
        None,
    )
    run_pass(tensors, Coefficients(0.0, 1.0, 0.0, 0.0, 0.0, 1.0), 0.0)
    expected = (-gradient).to(BF16)
    finite = ~gradient.isnan()
    ours = tensors.iterates[0]
    assert torch.equal(ours.view(torch.int16)[finite], expected.view(torch.int16)[finite])
    assert bool(ours[~finite].isnan().all())
    assert bool((~finite).any())


def _rounded(value, seed, size=200_000, rounding="stochastic"):
    """m and δ after a step that computes −value and +value for all their elements."""
    tensors = Tensors(
        [torch.zeros(size)],
        [torch.full((size,), value)],
        [torch.zeros(size, dtype=BF16)],
        [torch.zeros(size, dtype=BF16)],
    )
    coefficients = Coefficients(keep=0.0, gain=1.0, carry=-1.0, push=0.0, shrink=0.0, follow=1.0)
    run_pass(tensors, coefficients, 0.0, rounding=rounding, seed=seed)
    assert bool((tensors.weights[0] == torch.tensor(value)).all())
    return tensors.iterates[0].to(F64), tensors.offsets[0].to(F64)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(fraction):
    unit = 2.0**-7  # of bfloat16 between 1 and 2
    value = float(torch.tensor(1 + fraction * unit, dtype=F32))
    m, offset = _rounded(value, seed=3)
    for stored, truth in ((m, -value), (offset, value)):
        assert sorted(stored.abs().unique().tolist()) == [1, 1 + unit]
        assert abs(float(stored.mean()) - truth) < 0.01 * unit
    up = torch.stack([(m.abs() > 1).double(), (offset > 1).double()])
    neighbors = torch.stack([up[0, 1:], up[0, :-1]])
    blocks = torch.stack([up[0, 8192 : 2 * 8192], up[0, :8192]])
    seeds = torch.stack([up[0], (_rounded(value, seed=4)[0].abs() > 1).double()])
    for pair, most in ((up, 0.01), (neighbors, 0.01), (blocks, 0.05), (seeds, 0.01)):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < most


def test_stochastic_rounding_is_unbiased_over_seeds():
    draws = [_rounded(1 + 0.3 * 2.0**-7, seed, size=3)[0].abs() for seed in range(3000)]
    ups = (torch.stack(draws) > 1).double().mean(0)
    assert bool(((ups - 0.3).abs() < 0.05).all())


def test_stochastic_rounding_keeps_what_fits():
    for value in (1.0, -1.5, torch.inf, 0.0):
        m, offset = _rounded(value, seed=5, size=10_000)
        assert bool((m == -value).all())
        assert bool((offset == value).all())
    m, _ = _rounded(1.001, seed=5, size=10, rounding="nearest")
    assert bool((m == -1.0).all())


def test_stochastic_rounding_leaves_weights_to_nearest():
    tensors = tensors_of((70_000,), BF16)
    nearest, stochastic = copy_of(tensors), copy_of(tensors)
    run_pass(nearest, COEFFICIENTS["iterate"], FORCE)
    run_pass(stochastic, COEFFICIENTS["iterate"], FORCE, rounding="stochastic", seed=1)
    assert bits(nearest)[0] == bits(stochastic)[0]
    assert bits(nearest)[1] != bits(stochastic)[1]
    again, other = copy_of(tensors), copy_of(tensors)
    run_pass(again, COEFFICIENTS["iterate"], FORCE, rounding="stochastic", seed=1)
    run_pass(other, COEFFICIENTS["iterate"], FORCE, rounding="stochastic", seed=2)
    assert bits(again) == bits(stochastic)
    assert bits(other) != bits(stochastic)


def test_each_tensor_has_its_own_noise():
    one = torch.full((1000,), 1 + 0.5 * 2.0**-7)
    tensors = Tensors(
        [torch.zeros(1000), torch.zeros(1000)],
        [one, one],
        [torch.zeros(1000, dtype=BF16), torch.zeros(1000, dtype=BF16)],
    )
    run_pass(tensors, COEFFICIENTS["reset"], 0.0, rounding="stochastic")
    assert not torch.equal(*tensors.iterates)


def test_no_two_blocks_share_their_noise():
    entries = [(torch.zeros(20_000),) * 3, *[(torch.zeros(1),) * 3] * 3000]
    table = numba_pass._build_tables(range(len(entries)), entries)[0]
    positions = table._positions[table._owners] + table._starts
    assert len(positions) == 3003
    assert len(set(positions.tolist())) == len(positions)


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding must be one of nearest, stochastic, got 'up'"):
        run_pass(tensors_of((1,)), COEFFICIENTS["iterate"], 0.0, rounding="up")
