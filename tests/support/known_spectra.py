"""Symmetric matrices with known eigenvalues."""

import torch

from neumann.spectrum import FunctionOperator


def diagonal_operator(values, dtype=None):
    values = values if dtype is None else values.to(dtype)
    return FunctionOperator(lambda v: values * v, len(values), dtype=values.dtype)


def rotated_matrix(values, seed=0, dtype=torch.float64):
    """Return a dense matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(square)
    matrix = q @ torch.diag(values) @ q.T
    return ((matrix + matrix.T) / 2).to(dtype)


def network_like(size, seed=0):
    """A bulk near 0, a few large outliers, and a few negative ones just below the bulk."""
    generator = torch.Generator().manual_seed(seed)
    values = 0.01 * torch.randn(size, generator=generator, dtype=torch.float64)
    values[:9] = torch.logspace(-0.5, 0, 9, dtype=torch.float64)
    values[9:12] = torch.tensor([-0.06, -0.058, -0.05], dtype=torch.float64)
    return values


def clustered(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(size, generator=generator, dtype=torch.float64)
    return torch.where(torch.arange(size) % 3 == 0, 1 - 4e-3 * noise, -1 + 4e-3 * noise)


def close_pairs(size, seed=0):
    """Two eigenvalues at each end, 2.5 tolerances apart; the inner one is often found first."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(size, generator=generator, dtype=torch.float64) / 2
    values[:4] = torch.tensor([1, 1 - 2.5e-3, -1, -1 + 2.5e-3], dtype=torch.float64)
    return values


def log_spaced(size, seed=0):
    signs = 1 - 2 * (torch.arange(size) % 2)
    return signs * torch.logspace(-12, 0, size, dtype=torch.float64)


SPECTRA = {
    "network-like": network_like,
    "clustered": clustered,
    "close pairs": close_pairs,
    "log-spaced": log_spaced,
    "indefinite": lambda size, seed=0: torch.linspace(-1, 1, size, dtype=torch.float64),
    "negative": lambda size, seed=0: -torch.linspace(0.5, 3, size, dtype=torch.float64),
}
