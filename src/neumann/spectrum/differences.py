"""Products with the Hessian from gradients alone, by central differences.

    Hv ≈ (∇loss(w + hv) − ∇loss(w − hv)) / 2h

for models without a second derivative in autograd, and for parameters sharded by FSDP. With ‖v‖ = 1
the truncation error is h²/6 times a fourth derivative of the loss and rounding contributes eps/h
times the size of a gradient, so the best h goes with eps^⅓: 5e-3 in float32, 6e-6 in float64. The
weights round h too, each by eps times its size: above ‖w‖ = eps^-⅓ (200 in float32) h grows with
them, to eps^⅔·‖w‖. What is divided by is the step that the weights have really taken along v.

`product_error` compares products with steps h and 2h, which differ by three times the truncation
error of the former, in a random direction and in the one that the matrix turns it to; it becomes
part of every error bound. The weights move during a product and are put back bit for bit.

How it fails: where the loss has kinks (ReLU), h straddles some of them, and the answer is the
curvature at the scale h. In bfloat16 nothing is left of a difference, and it is refused; so is an h
of one's own that rounding turns by more than a tenth. Few weights far larger than all others make h
too large for the others, or are rounded themselves; `product_error` shows it. Under FSDP every rank
holds whole vectors of n numbers, and must have as many batches as the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from neumann.spectrum.basis import scalar_dtype
from neumann.spectrum.curvature import CurvatureOperator
from neumann.spectrum.objective import Loss
from neumann.spectrum.start import random_unit

TURNED = 0.1  # the largest part of a step that rounding may put beside its direction


def default_step(dtype: torch.dtype, length: float) -> float:
    """h for a unit vector and weights of that length: no less than shows in them."""
    root: float = torch.finfo(dtype).eps ** (1 / 3)
    return root * max(1.0, root * length)


class Differences(CurvatureOperator):
    """The Hessian of the mean loss, by central differences of gradients.

    Args:
        step: h for a unit vector; None for eps^⅓ of the dtype, more where the weights are large.

    All others as for :class:`CurvatureOperator`.
    """

    matrix = "hessian by differences"

    def __init__(
        self, model: nn.Module, loss: Loss, *, step: float | None = None, **options: Any
    ) -> None:
        super().__init__(model, loss, **options)
        self.step = step  # None: by the weights, in each session anew
        if step is not None and not 0 < step < float("inf"):
            raise ValueError(f"step must be finite and above 0, got {step!r}")
        self._sharded = any(hasattr(p, "placements") for p in self.parameters)
        if self._sharded and self.process_group is None:
            raise ValueError(
                "sharded parameters need process_group=, the ranks over which they are sharded"
            )
        self._taken_step: float | None = None  # of this session
        self._product_error: float | None = None  # of this session

    def _release(self) -> None:
        self._taken_step = self._product_error = None

    def _local_product(self, vector: Tensor) -> Tensor:
        return self._difference(vector, self._step())

    def _sum_ranks(self, total: Tensor) -> None:
        if not self._sharded:  # the gradients of sharded parameters are those of all ranks
            super()._sum_ranks(total)

    def _step(self) -> float:
        """h of this session, by the weights that it is about."""
        if self._taken_step is None:
            self._taken_step = self.step
        if self._taken_step is None:
            wide = scalar_dtype(self.device)
            squares = [_here(p).square().sum(dtype=wide) for p in self.parameters]
            length = float(self._over_shards(torch.stack(squares).sum())) ** 0.5
            self._taken_step = default_step(self.dtype, length)
        return self._taken_step

    def product_error(self) -> float:
        with self.session():
            if self._product_error is None:
                first = random_unit(self.size, 0, self.dtype, self.device)
                error, turned = self._error_along(first)
                size = float(torch.linalg.vector_norm(turned))
                if size > 0:
                    error = max(error, self._error_along(turned / size)[0])
                self._product_error = float(self.agree(torch.tensor(error, dtype=torch.float64)))
            return self._product_error

    def _error_along(self, unit: Tensor) -> tuple[float, Tensor]:
        near = self._looked_at(lambda: self._difference(unit, self._step()))
        both = torch.stack([near, self._difference(unit, 2 * self._step())])
        self._sum_ranks(both)
        return float(torch.linalg.vector_norm(both[1] - both[0])), both[0]

    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        raise NotImplementedError  # _local_product moves the weights once for all pieces

    def _difference(self, vector: Tensor, step: float) -> Tensor:
        length = float(torch.linalg.vector_norm(vector))
        if length == 0:
            return torch.zeros_like(vector)
        pieces = [
            _like(p, v) for p, v in zip(self.parameters, self.layout.split(vector), strict=True)
        ]
        before = [p.detach().clone() for p in self.parameters]
        gradients, steps = [], []
        try:
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for p, w, v in zip(self.parameters, before, pieces, strict=True):
                        p.copy_(w.add(v, alpha=sign * step / length))
                    steps.append(_taken(self.parameters, before, pieces, sign))
                gradients.append(self._gradient())
        finally:
            with torch.no_grad():
                for p, w in zip(self.parameters, before, strict=True):
                    p.copy_(w)
        along, squared = self._over_shards(steps[0] + steps[1])
        if self._passes.watching and not _kept(float(along), float(squared), length):
            raise ValueError(
                f"step={step:g} is lost in the rounding of the weights, which are too large for "
                "it; pass a larger step, or None for one that goes with them"
            )
        return gradients[0].sub_(gradients[1]).div_(along / length**2)

    def _over_shards(self, numbers: Tensor) -> Tensor:
        if self._sharded:
            distributed.all_reduce(numbers, group=self.process_group)
        return numbers

    def _gradient(self) -> Tensor:
        """Of this rank's part of the mean loss; of the whole where parameters are sharded."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, piece in enumerate(self.pieces):
            with torch.enable_grad():
                loss = self._loss(index) * (piece.examples / self.examples)
                total.add_(self._gradient_of(loss))
        return total

    def _gradient_of(self, loss: Tensor) -> Tensor:
        return self._sharded_gradient(loss) if self._sharded else super()._gradient_of(loss)

    def _sharded_gradient(self, loss: Tensor) -> Tensor:
        for p in self.parameters:
            p.grad = None  # the session puts it back
        (loss * self.about.ranks).backward()  # type: ignore[no-untyped-call]  # FSDP averages
        found = []
        for p in self.parameters:
            gradient: Any = p.grad
            sharded = hasattr(gradient, "full_tensor")
            found.append(gradient.full_tensor() if sharded else gradient)
        return self.layout.join(found)


def _taken(
    parameters: Sequence[Tensor], before: Sequence[Tensor], along: Sequence[Tensor], sign: float
) -> Tensor:
    """Of the step that the weights have taken: its product with the direction, and its square.

    Of sharded parameters, of what is here of them.
    """
    wide = scalar_dtype(before[0].device)
    parts = []
    for p, w, v in zip(parameters, before, along, strict=True):
        step = _here(p - w)
        product = sign * (step * _here(v)).sum(dtype=wide)
        parts.append(torch.stack([product, step.square().sum(dtype=wide)]))
    return torch.stack(parts).sum(0)


def _kept(along: float, squared: float, length: float) -> bool:
    """Whether the two steps, of ‖step‖² = squared together, go along a vector of that length."""
    return squared > 0 and 1 - along**2 / (2 * squared * length**2) <= TURNED**2


def _here(tensor: Tensor) -> Tensor:
    local: Any = getattr(tensor.detach(), "to_local", tensor.detach)
    found: Tensor = local()
    return found


def _like(p: Tensor, piece: Tensor) -> Tensor:
    """A piece of the flat vector, sharded as the parameter is."""
    placements: Any = getattr(p, "placements", None)
    if placements is None:
        return piece
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = getattr(p, "device_mesh", None)
    whole = DTensor.from_local(piece, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements)
