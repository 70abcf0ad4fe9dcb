"""The Hessian that the preconditioned series sees, along a large-batch training.

    python benchmarks/preconditioned_spectrum.py --device cuda --data-dir data \
        --output results/preconditioned-spectrum-h200.json

ResNet-9 on CIFAR-10 at batch 8192, trained with the spectral P at several momenta μ, lr/(1 − μ)
kept. At points in time the extreme eigenvalues of H and of PH on a probe batch, BatchNorm over the
batch, P from the probe's gradient. With the gradient's singular vectors held, the spectral P is
linear in its argument: (GGᵀ)^{-1/2} from the left for a matrix of no more rows than columns, from
the right otherwise, and 1/√v̂ for the rest, with the scales of `Spectral`. PH has the eigenvalues of
P^{1/2}HP^{1/2}.

On a quadratic, Nesterov's iteration is stable for ηλ < 2(1 + μ)/(1 + 2μ): ηλ_max of PH is printed
beside that limit.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from neumann.lab.data import Plan, load
from neumann.lab.models import build
from neumann.optim.spectral import Spectral, is_matrix
from neumann.spectrum import Hessian, extremes
from neumann.spectrum.operators import Operator

FLOOR = 2e-3  # of ‖G‖: five Newton–Schulz iterations leave smaller singular values smaller
SHARE = 0.02  # of λ_max, to which ends are measured
BUDGET = 150


class Turned(Operator):
    """P^{1/2}HP^{1/2} for a P that acts on every tensor by itself, as a matrix or elementwise."""

    def __init__(
        self, operator: Hessian, shapes: list[torch.Size], roots: list[tuple[str, Tensor]]
    ) -> None:
        super().__init__(operator.about)
        self._operator, self._shapes, self._roots = operator, shapes, roots

    def product(self, vector: Tensor) -> Tensor:
        return self._half(self._operator.product(self._half(vector)))

    @contextmanager
    def session(self) -> Iterator[None]:
        with self._operator.session():
            yield

    def _half(self, vector: Tensor) -> Tensor:
        pieces = []
        sizes = [shape.numel() for shape in self._shapes]
        parts = torch.split(vector, sizes)
        for piece, shape, (side, root) in zip(parts, self._shapes, self._roots, strict=True):
            if side == "each":
                pieces.append(piece * root.flatten())
                continue
            matrix = piece.reshape(shape[0], -1)
            pieces.append((root @ matrix if side == "left" else matrix @ root).flatten())
        return torch.cat(pieces)


def root_of(gradient: Tensor, second: Tensor | None, spectral: Spectral) -> tuple[str, Tensor]:
    """P^{1/2} of one tensor, and from which side it acts."""
    if not is_matrix(gradient):
        size = gradient.abs() if second is None else second.sqrt()
        return "each", (spectral.scale / (size + 1e-8)).sqrt()
    matrix = gradient.flatten(1).double()
    rows, columns = matrix.shape
    gram = matrix @ matrix.mT if rows <= columns else matrix.mT @ matrix
    values, vectors = torch.linalg.eigh(gram)
    singular = values.clamp(min=0).sqrt().clamp(min=FLOOR * float(matrix.norm()))
    scale = spectral.scale * max(rows, columns) ** 0.5
    root = vectors @ torch.diag((scale / singular).sqrt()) @ vectors.mT
    return ("left" if rows <= columns else "right"), root.to(gradient.dtype)


def measured(model: nn.Module, optimizer: Neumann, probe: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The ends of H and of PH at the present weights."""
    model.zero_grad()
    cross_entropy(model(probe[0]), probe[1]).backward()  # type: ignore[no-untyped-call]
    roots = []
    for p in model.parameters():
        assert p.grad is not None
        second = optimizer.state[p].get("preconditioner_vector_second_moment")
        roots.append(root_of(p.grad, second, Spectral()))
    model.zero_grad()
    shapes = [p.shape for p in model.parameters()]
    plain = Hessian(model, cross_entropy, batch=probe)
    found = {}
    for name, operator in (("H", plain), ("PH", Turned(plain, shapes, roots))):
        ends = extremes(operator, tolerance=SHARE, max_products=BUDGET)
        found[name] = {
            "smallest": ends.smallest.value,
            "largest": ends.largest.value,
            "converged": ends.converged,
            "products": ends.products,
        }
    return found


def follow(arguments: argparse.Namespace, momentum: float) -> list[dict[str, Any]]:
    """Train with one μ, and measure on the way."""
    device = torch.device(arguments.device)
    data = load(arguments.data, data_dir=arguments.data_dir, device=device)
    torch.manual_seed(0)
    model = build(arguments.model, data).to(device)
    peak = arguments.lr * (1 - momentum) / (1 - 0.6)
    optimizer = Neumann(
        model.parameters(),
        lr=peak,
        momentum=momentum,
        precondition="spectral",
        weight_decay=arguments.decay * arguments.lr / peak,
    )
    per_epoch = Plan(arguments.batch).batches_of(len(data.train))
    total, ramp = arguments.epochs * per_epoch, arguments.epochs * per_epoch / 6
    due = {round((k + 1) * total / (arguments.points + 1)) for k in range(arguments.points)}
    inputs, labels = next(iter(data.train.batches(Plan(arguments.probe, epoch=10**6))))[0]
    points = []
    step = 0
    for epoch in range(arguments.epochs):
        for ((images, targets),) in data.train.batches(Plan(arguments.batch, epoch=epoch)):
            lr = peak * min((step + 1) / ramp, (total - step) / (total - ramp))
            if step in due:
                ends = measured(model, optimizer, (inputs, labels))
                limit = 2 * (1 + momentum) / (1 + 2 * momentum)
                point = {"step": step, "lr": lr, "momentum": momentum, "limit": limit, **ends}
                points.append(point)
                print(
                    f"μ {momentum:<4g} step {step:4} lr {lr:.4f}  H {ends['H']['smallest']:9.3g} "
                    f"to {ends['H']['largest']:9.3g}  PH {ends['PH']['smallest']:9.3g} to "
                    f"{ends['PH']['largest']:9.3g}  ηλ_max {lr * ends['PH']['largest']:6.2f} "
                    f"limit {limit:.2f}",
                    flush=True,
                )
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = cross_entropy(model(images), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--probe", type=int, default=1024, help="examples measured on")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.03, help="for μ = 0.6")
    parser.add_argument("--decay", type=float, default=2.0, help="for μ = 0.6")
    parser.add_argument("--momenta", type=float, nargs="+", default=[0.0, 0.6, 0.9])
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    points = [point for momentum in arguments.momenta for point in follow(arguments, momentum)]
    if arguments.output:
        about = environment(torch.device(arguments.device), arguments.commit)
        text = json.dumps({"environment": about, "points": points}, indent=1)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
