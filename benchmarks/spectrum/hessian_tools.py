"""The tools that `compare_tools` compares: ours, and those of others."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.spectrum.short_training import Batch
from neumann.spectrum import Hessian, extremes

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Found:
    """What a tool returns."""

    smallest: float | None
    largest: float
    products: int
    says: str  # its own statement about convergence


Tool = Callable[[nn.Module, Batch, int], Found]  # the last argument is a seed


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.function(*arguments)


def ours(relative_to: Any = "largest", **options: Any) -> Tool:
    def measure(model: nn.Module, batch: Batch, seed: int) -> Found:
        operator = Hessian(model, cross_entropy, batch=batch)
        found = extremes(operator, seed=seed, relative_to=relative_to, **options)
        errors = f"±{found.smallest.error:.2g}, ±{found.largest.error:.2g}"
        says = f"{'converged' if found.converged else 'not converged'} ({errors})"
        return Found(found.smallest.value, found.largest.value, found.products, says)

    return measure


def pyhessian(model: nn.Module, batch: Batch, seed: int) -> Found:
    """The largest |λ| from its power iteration, λ_min as the smallest node of its density."""
    hessian = importlib.import_module("pyhessian").hessian
    torch.manual_seed(seed)
    computed = hessian(model, cross_entropy, data=batch, cuda=batch[0].is_cuda)
    module: Any = importlib.import_module("pyhessian.hessian")
    counted = module.hessian_vector_product = Counted(module.hessian_vector_product)
    try:
        (largest,), _ = computed.eigenvalues(maxIter=100, tol=TOLERANCE, top_n=1)
        try:
            nodes, _ = computed.density(iter=100, n_v=1)
            smallest, says = float(min(nodes[0])), "evaluation mode"
        except RuntimeError:  # it calls torch.eig, which newer versions have removed
            smallest, says = None, "evaluation mode; density() fails on this torch, so no λ_min"
    finally:
        module.hessian_vector_product = counted.function
    return Found(smallest, float(largest), counted.calls, says)


def curvlinops(model: nn.Module, batch: Batch, seed: int) -> Found:
    """Its operator in SciPy's eigsh, one eigenvalue at either end."""
    operator_class = importlib.import_module("curvlinops").HessianLinearOperator
    linalg = importlib.import_module("scipy.sparse.linalg")
    numpy = importlib.import_module("numpy")
    parameters = [p for p in model.parameters() if p.requires_grad]
    criterion = nn.CrossEntropyLoss()
    operator = operator_class(model, criterion, parameters, [batch], check_deterministic=False)
    inner = operator.to_scipy()
    counted = Counted(inner.__matmul__)
    wrapped = linalg.LinearOperator(inner.shape, matvec=counted, dtype=inner.dtype)
    start = numpy.random.default_rng(seed).standard_normal(inner.shape[0]).astype(inner.dtype)
    low, high = linalg.eigsh(
        wrapped, k=2, which="BE", tol=TOLERANCE, v0=start, return_eigenvectors=False
    )
    return Found(float(low), float(high), counted.calls, "converged")


def hessian_eigenthings(model: nn.Module, batch: Batch, seed: int) -> Found:
    """The extreme Ritz values of a run that is long enough for the tool to call both converged.

    The number of steps grows by a factor of 1.42 until it is. Only the last run counts.
    """
    package = importlib.import_module("hessian_eigenthings")
    operator = package.HessianOperator(model, [batch], package.supervised_loss(cross_entropy))
    steps = EIGENTHINGS_STEPS.get(id(model), 25)
    options = {"tol": TOLERANCE, "which": "LA", "seed": seed}
    while True:
        found = package.lanczos(operator, k=steps, max_iter=steps, **options)
        ends = [int(found.eigenvalues.argmin()), int(found.eigenvalues.argmax())]
        done = bool(found.converged[ends].all())
        if done or steps >= 400:
            break
        steps = int(steps * 1.42)
    EIGENTHINGS_STEPS[id(model)] = steps
    low, high = (float(found.eigenvalues[end]) for end in ends)
    return Found(low, high, found.iterations, "converged" if done else "not converged")


# Found in the warm-up, so that the timed runs do not search for the number of steps.
EIGENTHINGS_STEPS: dict[int, int] = {}

TOOLS: dict[str, tuple[str, Tool]] = {  # the package it needs, and the function
    "neumann.spectrum": ("neumann", ours()),
    "neumann.spectrum, each end to 1e-3 of itself": ("neumann", ours("itself")),
    "10 Lanczos steps, as in the paper": ("neumann", ours(tolerance=0.0, max_products=10)),
    "curvlinops and scipy's eigsh": ("curvlinops", curvlinops),
    "hessian-eigenthings": ("hessian_eigenthings", hessian_eigenthings),
    "PyHessian": ("pyhessian", pyhessian),
}
