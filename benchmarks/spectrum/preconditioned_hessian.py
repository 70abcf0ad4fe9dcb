"""The Hessian that the preconditioned series sees, during large-batch training.

    python -m benchmarks.spectrum.preconditioned_hessian --device cuda --data-dir data

ResNet-9 on CIFAR-10 at batch 8192, trained with the spectral P at several momenta μ and constant
lr/(1 − μ). At some steps the script measures the extreme eigenvalues of H and of PH, which are
those of P^{1/2}HP^{1/2}, on a probe batch. P comes from the probe's gradient G: (GGᵀ)^{-1/2} from
the shorter side of a matrix, 1/√v̂ for the rest, with the scales of `Spectral`. On a quadratic,
Nesterov's iteration is stable for ηλ < 2(1 + μ)/(1 + 2μ); the script prints ηλ_max beside it.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common.script import create_parser, write_measurements
from benchmarks.spectrum.short_training import PROBE_EPOCH, train_with_pauses
from neumann import Neumann
from neumann.lab.data import Plan, load
from neumann.lab.models import build
from neumann.optim.preconditioners import Diagonal, Spectral
from neumann.optim.preconditioners.orthogonalization import is_matrix
from neumann.spectrum import Hessian, Operator, extremes

FLOOR = 2e-3  # of ‖G‖: five Newton–Schulz iterations do not bring smaller singular values to 1
TOLERANCE = 0.02  # of λ_max
MAX_PRODUCTS = 150
TUNED_MOMENTUM = 0.6  # --lr and --decay are meant for this μ


class PreconditionedHessian(Operator):
    """P^{1/2}HP^{1/2} for a P that acts on each tensor alone, by the roots of `find_root`."""

    def __init__(
        self, hessian: Hessian, shapes: list[torch.Size], roots: list[tuple[str, Tensor]]
    ) -> None:
        super().__init__(hessian.about)
        self._hessian, self._shapes, self._roots = hessian, shapes, roots

    def product(self, vector: Tensor) -> Tensor:
        return self._apply_root(self._hessian.product(self._apply_root(vector)))

    @contextmanager
    def session(self) -> Iterator[None]:
        with self._hessian.session():
            yield

    def _apply_root(self, vector: Tensor) -> Tensor:
        found = []
        pieces = torch.split(vector, [shape.numel() for shape in self._shapes])
        for piece, shape, (side, root) in zip(pieces, self._shapes, self._roots, strict=True):
            if side == "elementwise":
                found.append(piece * root.flatten())
            else:
                matrix = piece.reshape(shape[0], -1)
                found.append((root @ matrix if side == "left" else matrix @ root).flatten())
        return torch.cat(found)


def find_root(
    gradient: Tensor, state: Mapping[str, Tensor], spectral: Spectral
) -> tuple[str, Tensor]:
    """P^{1/2} of one tensor, and from which side it acts. `state` is what the optimizer keeps."""
    if not is_matrix(gradient):
        diagonal = spectral.vectors
        assert isinstance(diagonal, Diagonal)
        seen = state["preconditioner_vector_seen"]
        corrected = state["preconditioner_vector_second_moment"] / (1 - diagonal.decay**seen)
        return "elementwise", (diagonal.scale / (corrected.sqrt() + diagonal.eps)).sqrt()
    matrix = gradient.flatten(1).double()
    rows, columns = matrix.shape
    gram = matrix @ matrix.mT if rows <= columns else matrix.mT @ matrix
    values, vectors = torch.linalg.eigh(gram)
    singular = values.clamp(min=0).sqrt().clamp(min=FLOOR * float(matrix.norm()))
    scale = spectral.scale * max(rows, columns) ** 0.5
    root = vectors @ torch.diag((scale / singular).sqrt()) @ vectors.mT
    return ("left" if rows <= columns else "right"), root.to(gradient.dtype)


def measure(model: nn.Module, optimizer: Neumann, probe: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The extreme eigenvalues of H and of PH at the current weights."""
    model.zero_grad()
    cross_entropy(model(probe[0]), probe[1]).backward()
    roots = []
    for p in model.parameters():
        assert p.grad is not None
        roots.append(find_root(p.grad, optimizer.state[p], Spectral()))
    model.zero_grad()
    hessian = Hessian(model, cross_entropy, batch=probe)
    preconditioned = PreconditionedHessian(hessian, [p.shape for p in model.parameters()], roots)
    found = {}
    for name, operator in (("H", hessian), ("PH", preconditioned)):
        ends = extremes(operator, tolerance=TOLERANCE, max_products=MAX_PRODUCTS)
        found[name] = {
            "smallest": ends.smallest.value,
            "largest": ends.largest.value,
            "converged": ends.converged,
            "products": ends.products,
        }
    return found


def train_and_measure(arguments: argparse.Namespace, momentum: float) -> list[dict[str, Any]]:
    """Train with one μ and measure on the way."""
    data = load(arguments.data, data_dir=arguments.data_dir, device=torch.device(arguments.device))
    torch.manual_seed(0)
    model = build(arguments.model, data).to(arguments.device)
    peak = arguments.lr * (1 - momentum) / (1 - TUNED_MOMENTUM)
    decay = arguments.decay * arguments.lr / peak
    options: dict[str, Any] = {"precondition": "spectral", "weight_decay": decay}
    optimizer = Neumann(model.parameters(), lr=peak, momentum=momentum, **options)
    total = arguments.epochs * Plan(arguments.batch).count_batches(len(data.train))
    ramp = total / 6
    due = {round((k + 1) * total / (arguments.points + 1)) for k in range(arguments.points)}
    probe = next(iter(data.train.batches(Plan(arguments.probe, epoch=PROBE_EPOCH))))[0]
    limit = 2 * (1 + momentum) / (1 + 2 * momentum)

    def choose_lr(step: int) -> float:
        return float(peak * min((step + 1) / ramp, (total - step) / (total - ramp)))

    points: list[dict[str, Any]] = []
    epochs = arguments.epochs
    for step in train_with_pauses(model, optimizer, data, arguments.batch, epochs, choose_lr):
        if step in due:
            point = {"step": step, "lr": choose_lr(step), "momentum": momentum, "limit": limit}
            points.append(point | measure(model, optimizer, probe))
            print(describe(points[-1]), flush=True)
    return points


def describe(point: dict[str, Any]) -> str:
    return (
        "μ {momentum:<4g} step {step:4} lr {lr:.4f}  "
        "H {H[smallest]:9.3g} to {H[largest]:9.3g}  PH {PH[smallest]:9.3g} to {PH[largest]:9.3g}  "
        "ηλ_max {largest:6.2f} limit {limit:.2f}"
    ).format(largest=point["lr"] * point["PH"]["largest"], **point)


def main() -> None:
    parser = create_parser(__doc__, "cpu")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--points", type=int, default=5, help="how often to measure")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--probe", type=int, default=1024, help="examples in the probe batch")
    parser.add_argument("--lr", type=float, default=0.03, help="for μ = 0.6")
    parser.add_argument("--decay", type=float, default=2.0, help="for μ = 0.6")
    parser.add_argument("--momenta", type=float, nargs="+", default=[0.0, 0.6, 0.9])
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    points = [point for m in arguments.momenta for point in train_and_measure(arguments, m)]
    write_measurements(arguments, arguments.device, points=points)


if __name__ == "__main__":
    main()
