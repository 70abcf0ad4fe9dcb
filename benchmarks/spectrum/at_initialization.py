"""The paper's "initially, there are many large negative eigenvalues" (section 3.1), counted.

    python -m benchmarks.spectrum.at_initialization --device cuda --data-dir data --epochs 10 \\
        --output start.json

For several draws of the initial weights the script measures the density of the Hessian's spectrum
on a mini-batch, in float32 with BatchNorm over the batch. From the nodes and weights of the
quadrature it counts the eigenvalues beyond ± some shares of λ_max, and the share of Σλ² that the
negative ones have. With --epochs it measures again after that much SGD, for comparison.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.common.script import create_parser, write_measurements
from benchmarks.spectrum.short_training import PROBE_EPOCH, Batch, train_with_pauses
from neumann.lab.data import Plan, load
from neumann.lab.models import build
from neumann.spectrum import Density, Hessian, density

SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of λ_max; beyond one of them an eigenvalue is large


def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(arguments.device)
    data = load(arguments.data, data_dir=arguments.data_dir, device=device)
    (probe,) = next(iter(data.train.batches(Plan(arguments.batch, epoch=PROBE_EPOCH))))
    found = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = build(arguments.model, data).to(device)
        sgd = torch.optim.SGD(model.parameters(), lr=arguments.lr, weight_decay=5e-4)
        total = arguments.epochs * Plan(arguments.batch).count_batches(len(data.train))

        def choose_lr(step: int, total: int = total) -> float:
            return float(arguments.lr * (1 - step / total))

        run = train_with_pauses(model, sgd, data, arguments.batch, arguments.epochs, choose_lr)
        found += [
            measure(model, probe, arguments, seed, step) for step in run if step in (0, total)
        ]
    return found


def measure(
    model: nn.Module, probe: Batch, arguments: argparse.Namespace, seed: int, step: int
) -> dict[str, Any]:
    operator = Hessian(model, cross_entropy, batch=probe)
    found = density(operator, probes=arguments.probes, steps=arguments.products)
    line = {"seed": seed, "step": step, **describe(found)}
    print(say(line), flush=True)
    return line


def describe(found: Density) -> dict[str, Any]:
    """The ends, the counts beyond shares of λ_max, and the density itself, as plain values."""
    largest = max(float(nodes[-1]) for nodes in found.nodes)
    smallest = min(float(nodes[0]) for nodes in found.nodes)
    squares = [(w * n.square(), n < 0) for n, w in zip(found.nodes, found.weights, strict=True)]
    return {
        "parameters": found.about.parameters,
        "examples": found.about.examples,
        "products": found.products,
        "largest": largest,
        "smallest": smallest,
        "beyond": [
            {
                "share": share,
                "below": count_below(found, -share * largest),
                "above": count_below(found, share * largest, above=True),
            }
            for share in SHARES
        ],
        "negative_squares": float(
            sum(s[negative].sum() for s, negative in squares) / sum(s.sum() for s, _ in squares)
        ),
        "trace": found.trace.value,
        "frobenius": found.frobenius.value,
        "width": found.width,
        "points": found.points.tolist(),
        "density": found.density.tolist(),
    }


def count_below(found: Density, threshold: float, above: bool = False) -> dict[str, float]:
    """Estimate how many eigenvalues are at most (or at least) this, with the error of the mean."""
    counts = found.about.parameters * torch.stack(
        [
            weights[nodes >= threshold if above else nodes <= threshold].sum()
            for nodes, weights in zip(found.nodes, found.weights, strict=True)
        ]
    )
    return {"count": float(counts.mean()), "error": float(counts.std()) / found.probes**0.5}


def say(line: dict[str, Any]) -> str:
    beyond = []
    for each in line["beyond"]:
        below, above = each["below"], each["above"]["count"]
        counted = f"{below['count']:.3g} ± {below['error']:.1g}"
        beyond.append(f"{counted} below −{each['share']:g}·λ_max ({above:.3g} above +)")
    return (
        f"seed {line['seed']}, step {line['step']}: λ {line['smallest']:.4g} to "
        f"{line['largest']:.4g}; of {line['parameters']:,} eigenvalues {', '.join(beyond)}; "
        f"the negative ones have {line['negative_squares']:.1%} of Σλ²"
    )


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3, help="draws of the initial weights")
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--products", type=int, default=100, help="Lanczos steps per probe")
    parser.add_argument("--epochs", type=int, default=0, help="measure again after these of SGD")
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = measure_all(arguments)
    paths = ("data_dir", "output", "commit")
    settings = {k: v for k, v in vars(arguments).items() if k not in paths}
    write_measurements(arguments, arguments.device, settings=settings, measurements=found)


if __name__ == "__main__":
    main()
