"""The CPU kernel on tensors however they lie in memory."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba")

from neumann.optim.backends.cpu import numba_pass
from neumann.optim.strides import is_dense
from neumann.optim.tensors import Tensors
from tests.support.cpu_passes import (
    BF16,
    C64,
    COEFFICIENTS,
    F32,
    LAYOUTS,
    check,
    laid_out,
    tensors_of,
)


@pytest.mark.parametrize("dtype", [F32, BF16, C64])
@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("weight", LAYOUTS)
def test_layouts(weight, gradient, dtype):
    plain = tensors_of([(6, 5, 3, 4), (1, 5, 1, 1), (16, 24, 5, 5)], dtype)
    for state in {weight, "contiguous"}:
        tensors = Tensors(
            [laid_out(t, weight) for t in plain.weights],
            [laid_out(t, gradient) for t in plain.gradients],
            [laid_out(t, state) for t in plain.iterates],
            [laid_out(t, weight) for t in plain.offsets],
        )
        strides = [t.stride() for t in tensors.weights]
        check(tensors, COEFFICIENTS["iterate"])
        assert [t.stride() for t in tensors.weights] == strides
        for tensor in tensors.weights:
            if weight in ("sliced", "columns"):
                around = tensor._base.clone()
                around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(77)
                assert bool((around == 77).all())


def test_a_dense_layout_is_not_copied(monkeypatch):
    monkeypatch.setattr(numba_pass, "_prepare_staged", None)
    plain = tensors_of([(6, 5, 3, 4)])
    for layout in ("contiguous", "transposed", "channels last"):
        lists = (plain.weights, plain.gradients, plain.iterates, plain.offsets)
        laid = [[laid_out(t, layout) for t in tensors] for tensors in lists]
        check(Tensors(*laid), COEFFICIENTS["iterate"])


def test_scalars_expanded_and_negated_gradients():
    z = torch.randn(2, 4, dtype=C64)
    gradients = [
        z[0, 0].conj().imag,
        torch.randn(()).expand(4),
        z[1].conj().imag,
        torch.tensor(3.0),
    ]
    assert gradients[0].is_neg()
    assert gradients[2].is_neg()
    tensors = tensors_of([(), (4,), (4,), ()])
    check(replace(tensors, gradients=gradients), COEFFICIENTS["iterate"])


def test_conjugated_tensors():
    tensors = tensors_of([(7,), (3, 4)], C64)
    check(
        Tensors(
            [t.conj() for t in tensors.weights],
            [t.conj() for t in tensors.gradients],
            tensors.iterates,
            [t.conj() for t in tensors.offsets],
        ),
        COEFFICIENTS["iterate"],
    )


def test_the_layouts_of_these_tests_differ():
    """The tests above are only as good as their inputs."""
    plain = torch.randn(6, 5, 3, 4)
    laid = {layout: laid_out(plain, layout) for layout in LAYOUTS}
    assert all(torch.equal(t, plain) for t in laid.values())
    dense = [name for name, t in laid.items() if is_dense(t.shape, t.stride())]
    assert dense == list(LAYOUTS[:3])
    assert len({t.stride() for t in laid.values()}) == len(LAYOUTS)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 4), (1, 5), ()])
def test_tensors_without_gaps_are_dense(shape):
    assert is_dense(shape, torch.empty(shape).stride())
    assert not is_dense((4, 3), torch.empty(4, 6)[:, ::2].stride())
