"""λ_min and λ_max of networks with about 20,000 parameters, beside all their eigenvalues.

    python -m benchmarks.spectrum.dense_hessian --device cuda --output spectrum-dense.json

The dense Hessian of the loss on a batch of digits is computed in float64, and not from the products
under test. Its eigenvalues are compared with the values and error bounds of `extremes` in float32.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.script import create_parser, write_measurements
from benchmarks.common.timing import read_clock
from benchmarks.spectrum.short_training import train_on_batch
from neumann.lab.data import Plan, load
from neumann.spectrum import Hessian, extremes

BLOCK = 256  # unit vectors at once


def build_dense(width: int, block: Callable[[int], list[nn.Module]]) -> nn.Module:
    layers = [nn.Linear(64, width), *block(width), nn.Linear(width, width), *block(width)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def build_tanh(width: int) -> nn.Module:
    return build_dense(width, lambda width: [nn.Tanh()])


def build_batchnorm(width: int) -> nn.Module:
    return build_dense(width, lambda width: [nn.BatchNorm1d(width), nn.ReLU()])


def build_convolutional(width: int) -> nn.Module:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *convolution(1, width),
        *convolution(width, 2 * width),
        nn.MaxPool2d(2),
        *convolution(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "tanh layers": (build_tanh, 112),
    "layers with BatchNorm": (build_batchnorm, 112),
    "convolutions with BatchNorm": (build_convolutional, 20),
}


def measure(
    name: str, network: nn.Module, device: torch.device, batch_size: int, steps: int
) -> dict[str, Any]:
    """Train for a few steps, then find both ends of the spectrum in both ways."""
    batch = next(iter(load("digits", device=device).train.batches(Plan(batch_size))))[0]
    network = network.to(device)
    train_on_batch(network, batch, steps, lr=0.1)
    start = read_clock(device)
    found = extremes(Hessian(network, cross_entropy, batch=batch))
    middle = read_clock(device)
    matrix = compute_hessian(copy.deepcopy(network).double(), batch[0].double(), batch[1])
    eigenvalues = torch.linalg.eigvalsh(matrix)
    dense = (float(eigenvalues[0]), float(eigenvalues[-1]))
    end = read_clock(device)
    values = (found.smallest.value, found.largest.value)
    stated = (found.smallest.error, found.largest.error)
    true = (abs(values[0] - dense[0]), abs(values[1] - dense[1]))
    return {  # pairs are for λ_min and λ_max
        "network": name,
        "parameters": sum(p.numel() for p in network.parameters()),
        "dense": dense,
        "found": values,
        "stated": stated,  # error bounds
        "true": true,  # errors
        "converged": found.converged,
        "products": found.products,
        "seconds": middle - start,
        "dense_seconds": end - middle,
        # The errors are within the bounds, and the bounds below 1e-3·λ_max.
        "within": all(t <= s < 1e-3 * dense[1] for t, s in zip(true, stated, strict=True)),
    }


def compute_hessian(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The Hessian of the loss, (n, n)."""
    parameters = list(network.parameters())
    loss = cross_entropy(network(inputs), labels)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.flatten() for g in gradients])
    size = gradient.numel()
    matrix = gradient.new_empty(size, size)
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        units = gradient.new_zeros(count, size)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        rows = torch.autograd.grad(
            gradient, parameters, units, retain_graph=True, is_grads_batched=True
        )
        matrix[start : start + count] = torch.cat([row.flatten(1) for row in rows], 1)
    return (matrix + matrix.T) / 2


def describe(row: dict[str, Any]) -> str:
    verdict = "within" if row["within"] else "NOT WITHIN"
    return (
        "{network}, {parameters:,} parameters: dense {dense[0]:.7g}, {dense[1]:.7g}; "
        "found {found[0]:.7g} ± {stated[0]:.2g}, {found[1]:.7g} ± {stated[1]:.2g}; "
        "true errors {true[0]:.2g}, {true[1]:.2g}; {products} products in {seconds:.2f} s, "
        "dense in {dense_seconds:.1f} s: {verdict}"
    ).format(verdict=verdict, **row)


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the networks' widths")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="of SGD before the measurement")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(arguments.device)
    rows = []
    for name, (build, width) in NETWORKS.items():
        network = build(max(round(width * arguments.scale), 2))
        rows.append(measure(name, network, device, arguments.batch, arguments.steps))
        print(describe(rows[-1]), flush=True)
    write_measurements(arguments, device, rows=rows)


if __name__ == "__main__":
    main()
