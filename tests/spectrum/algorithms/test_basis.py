"""The storage of the Lanczos vectors."""

import torch

from neumann.spectrum.algorithms.basis import ROWS_PER_BLOCK, Basis, sliced_product


def test_memory_grows_with_the_steps():
    for steps in (1, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 100):
        basis = Basis(10, torch.float32, torch.device("cpu"), host=False)
        for _ in range(steps):
            basis.append(torch.zeros(10))
        held = sum(block.numel() for block in basis.blocks)
        assert 10 * steps <= held < 10 * (steps + ROWS_PER_BLOCK)
    basis.truncate(ROWS_PER_BLOCK)
    assert len(basis.blocks) == 1


def test_sliced_product_is_the_product():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 256 * 7 + 13, generator=generator, dtype=torch.float64)
    vector = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    assert torch.allclose(sliced_product(rows, vector), rows @ vector)
    assert torch.allclose(
        sliced_product(rows[:3].float(), vector.float()).float(),
        rows[:3].float() @ vector.float(),
        atol=1e-4,
    )
