"""λ_min and λ_max of networks with about 20,000 parameters, beside all their eigenvalues.

    python benchmarks/spectrum_dense.py --device cuda --output results/spectrum-dense-h200.json

The Hessian of the loss on a batch of digits is written out, in float64 and by other means than the
products that are tested: the gradient is differentiated along all unit vectors at once, in blocks.
Its eigenvalues stand beside what `extremes` says in float32 and with which error. The weights have
been trained for some steps: at initialization the spectrum has no outliers to speak of.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann.lab.data import Plan, load
from neumann.spectrum import Hessian, extremes

BLOCK = 256  # unit vectors at once


@dataclass(frozen=True)
class Row:
    """One network. Eigenvalues of the Hessian; errors are the stated and the true ones."""

    network: str
    parameters: int
    dense: tuple[float, float]  # λ_min, λ_max in float64
    found: tuple[float, float]
    stated: tuple[float, float]
    true: tuple[float, float]
    converged: bool
    products: int
    seconds: float  # of `extremes`
    dense_seconds: float
    within: bool  # the stated errors hold, and are below 1e-3·λ_max


def plain(width: int) -> nn.Module:
    """Tanh layers without normalisation."""
    return nn.Sequential(
        nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


def normalised(width: int) -> nn.Module:
    """ReLU layers with BatchNorm."""
    return nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def convolutional(width: int) -> nn.Module:
    """Convolutions with BatchNorm, and pooling."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "tanh layers": (plain, 112),
    "layers with BatchNorm": (normalised, 112),
    "convolutions with BatchNorm": (convolutional, 20),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="of the networks' widths")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="of SGD before the measurement")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(arguments.device)
    rows = []
    for name, (make, width) in NETWORKS.items():
        rows.append(measure(name, make(max(round(width * arguments.scale), 2)), arguments, device))
        show(rows[-1])
    if arguments.output:
        content = {
            "environment": environment(device, arguments.commit),
            "rows": [asdict(row) for row in rows],
        }
        arguments.output.write_text(json.dumps(content, indent=2) + "\n")


def measure(
    name: str, network: nn.Module, arguments: argparse.Namespace, device: torch.device
) -> Row:
    """Train a little, then both ways."""
    data = load("digits", device=device)
    batch = next(iter(data.train.batches(Plan(arguments.batch))))[0]
    network = network.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        cross_entropy(network(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    wait(device)
    begun = time.perf_counter()
    found = extremes(Hessian(network, cross_entropy, batch=batch))
    wait(device)
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    matrix = dense(copy.deepcopy(network).double(), batch[0].double(), batch[1])
    eigenvalues = torch.linalg.eigvalsh(matrix)
    ends = (float(eigenvalues[0]), float(eigenvalues[-1]))
    values = (found.smallest.value, found.largest.value)
    stated = (found.smallest.error, found.largest.error)
    true = (abs(values[0] - ends[0]), abs(values[1] - ends[1]))
    return Row(
        name,
        sum(p.numel() for p in network.parameters()),
        ends,
        values,
        stated,
        true,
        found.converged,
        found.products,
        seconds,
        time.perf_counter() - begun,
        all(t <= s < 1e-3 * ends[1] for t, s in zip(true, stated, strict=True)),
    )


def dense(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The Hessian (n, n) in float64."""
    parameters = list(network.parameters())
    loss = cross_entropy(network(inputs), labels)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)]
    )
    size = gradient.numel()
    matrix = torch.empty(size, size, dtype=gradient.dtype, device=gradient.device)
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        units = torch.zeros(count, size, dtype=gradient.dtype, device=gradient.device)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        rows = torch.autograd.grad(
            gradient, parameters, units, retain_graph=True, is_grads_batched=True
        )
        matrix[start : start + count] = torch.cat([r.flatten(1) for r in rows], 1)
    return (matrix + matrix.T) / 2


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(row: Row) -> None:
    print(
        f"{row.network}, {row.parameters:,} parameters: dense {row.dense[0]:.7g}, "
        f"{row.dense[1]:.7g}; found {row.found[0]:.7g} ± {row.stated[0]:.2g}, "
        f"{row.found[1]:.7g} ± {row.stated[1]:.2g}; true errors {row.true[0]:.2g}, "
        f"{row.true[1]:.2g}; {row.products} products in {row.seconds:.2f} s, dense in "
        f"{row.dense_seconds:.1f} s: {'within' if row.within else 'NOT WITHIN'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
