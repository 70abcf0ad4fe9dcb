"""The preconditioners of the leads, against formulas."""

import pytest
import torch

from benchmarks.language.lead_preconditioners import (
    EvenRows,
    ScaledRows,
    SlowSum,
    Whitened,
)
from neumann.optim.preconditioners import Spectral


def test_whitening_of_one_matrix_is_a_power_of_its_singular_values():
    """L and R of a constant M are MMᵀ and MᵀM: the singular values s become s^(1 − 4·power)."""
    torch.manual_seed(0)
    m = torch.randn(6, 4)
    p = Whitened(power=0.15)
    states = [p.create(m)]
    for _ in range(3):
        (found,) = p.apply([m], states)
    expected = torch.linalg.svdvals(m) ** 0.4
    values = torch.linalg.svdvals(found)
    torch.testing.assert_close(values / values[0], expected / expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.norm(), m.norm())


def test_a_slow_sum_adds_a_share_of_all_gradients():
    p = SlowSum(fast=0.8, slow=0.5, weight=0.25)
    states = [p.create(torch.zeros(1))]
    found = [p.apply([torch.tensor([g])], states)[0].item() for g in (1.0, 0.0, 2.0)]
    # g + 0.8·b + 0.25·s; b is 1, 0.8 and 2.64, s is 1, 0.5 and 2.25
    assert found == pytest.approx([2.05, 0.765, 4.6745])


def test_scaled_rows_have_the_same_size():
    torch.manual_seed(0)
    m = torch.randn(6, 4) * torch.tensor([1e-3, 1.0, 1.0, 1.0, 1.0, 1e3])[:, None]
    (found,) = ScaledRows(power=1.0).apply([m], [{}])
    torch.testing.assert_close(found.norm(dim=1), torch.ones(6))
    assert not ScaledRows(power=1.0).apply([torch.zeros(6, 4)], [{}])[0].any()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)])
def test_whitening_of_the_shorter_side_has_the_same_power(shape):
    torch.manual_seed(0)
    m = torch.randn(*shape)
    p = Whitened(power=0.15, sides="shorter")
    states = [p.create(m)]
    sizes = {len(value) for name, value in states[0].items() if name != "calls"}
    assert sizes == {4}
    for _ in range(3):
        (found,) = p.apply([m], states)
    expected = torch.linalg.svdvals(m) ** 0.4
    values = torch.linalg.svdvals(found)
    torch.testing.assert_close(values / values[0], expected / expected[0], rtol=1e-3, atol=1e-3)


def test_even_rows_have_the_same_size():
    torch.manual_seed(0)
    g = torch.randn(16, 4)
    plain = Spectral(scale=1.0, before=None, scaling="norm")
    even = EvenRows(scale=1.0, before=None, scaling="norm", power=1.0)
    (found,) = even.apply([g], [even.create(g)])
    (usual,) = plain.apply([g], [plain.create(g)])
    assert found.norm(dim=1).std() < 1e-5 < usual.norm(dim=1).std()
    torch.testing.assert_close(found.norm(), usual.norm())
