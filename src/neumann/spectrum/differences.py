"""Products with the Hessian from gradients alone, by central differences.

    Hv ≈ (∇loss(w + hv) − ∇loss(w − hv)) / 2h

for models without a second derivative in autograd, and for parameters sharded by FSDP. With ‖v‖ = 1
the truncation error is h²/6 times a fourth derivative of the loss and rounding contributes eps/h
times the size of a gradient, so the best h goes with eps^⅓: 5e-3 in float32, 6e-6 in float64.

`product_error` compares products with steps h and 2h, which differ by three times the truncation
error of the former, in a random direction and in the one that the matrix turns it to; it becomes
part of every error bound. The weights move during a product and are put back bit for bit.

How it fails: where the loss has kinks (ReLU), h straddles some of them, and the answer is the
curvature at the scale h. In bfloat16 nothing is left of a difference, and it is refused. Under FSDP
every rank holds whole vectors of n numbers, and must have as many batches as the others.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from neumann.spectrum.curvature import CurvatureOperator
from neumann.spectrum.objective import Loss
from neumann.spectrum.start import random_unit


def default_step(dtype: torch.dtype) -> float:
    """h for a unit vector: the cube root of the dtype's rounding error."""
    return float(torch.finfo(dtype).eps ** (1 / 3))


class Differences(CurvatureOperator):
    """The Hessian of the mean loss, by central differences of gradients.

    Args:
        step: h for a unit vector; None for eps^⅓ of the dtype.

    All others as for :class:`CurvatureOperator`.
    """

    matrix = "hessian by differences"

    def __init__(
        self, model: nn.Module, loss: Loss, *, step: float | None = None, **options: Any
    ) -> None:
        super().__init__(model, loss, **options)
        self.step = default_step(self.dtype) if step is None else step
        if not 0 < self.step < float("inf"):
            raise ValueError(f"step must be finite and above 0, got {step!r}")
        self._sharded = any(hasattr(p, "placements") for p in self.parameters)
        if self._sharded and self.process_group is None:
            raise ValueError(
                "sharded parameters need process_group=, the ranks over which they are sharded"
            )
        self._product_error: float | None = None

    def product(self, vector: Tensor) -> Tensor:
        if not self._open:
            with self.session():
                return self.product(vector)
        answer = self._difference(vector, self.step)
        if self.process_group is not None and not self._sharded:
            distributed.all_reduce(answer, group=self.process_group)
        return answer.add_(vector, alpha=self.weight_decay) if self.weight_decay else answer

    def product_error(self) -> float:
        if self._product_error is None:
            with self.session():
                first = random_unit(self.size, 0, self.dtype, self.device)
                error, turned = self._error_along(first)
                size = float(torch.linalg.vector_norm(turned))
                if size > 0:
                    error = max(error, self._error_along(turned / size)[0])
            self._product_error = float(self.agree(torch.tensor(error, dtype=torch.float64)))
        return self._product_error

    def _error_along(self, unit: Tensor) -> tuple[float, Tensor]:
        near, far = self._difference(unit, self.step), self._difference(unit, 2 * self.step)
        both = torch.stack([near, far])
        if self.process_group is not None and not self._sharded:
            distributed.all_reduce(both, group=self.process_group)
        return float(torch.linalg.vector_norm(both[1] - both[0])), both[0]

    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        raise NotImplementedError  # product() moves the weights once for all pieces

    def _difference(self, vector: Tensor, step: float) -> Tensor:
        length = torch.linalg.vector_norm(vector)
        if not length > 0:
            return torch.zeros_like(vector)
        step = step / float(length)
        pieces = [
            _like(p, v) for p, v in zip(self.parameters, self.layout.split(vector), strict=True)
        ]
        before = [p.detach().clone() for p in self.parameters]
        gradients = []
        try:
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for p, w, v in zip(self.parameters, before, pieces, strict=True):
                        p.copy_(w.add(v, alpha=sign * step))
                gradients.append(self._gradient())
        finally:
            with torch.no_grad():
                for p, w in zip(self.parameters, before, strict=True):
                    p.copy_(w)
        return gradients[0].sub_(gradients[1]).div_(2 * step)

    def _gradient(self) -> Tensor:
        """Of this rank's part of the mean loss; of the whole where parameters are sharded."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, piece in enumerate(self.pieces):
            with torch.enable_grad():
                loss = self._loss(index) * (piece.examples / self.examples)
                if self._sharded:
                    total.add_(self._sharded_gradient(loss))
                elif loss.requires_grad:
                    found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                    total.add_(self.layout.join(found))
        return total

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


def _like(p: Tensor, piece: Tensor) -> Tensor:
    """A piece of the flat vector, sharded as the parameter is."""
    placements: Any = getattr(p, "placements", None)
    if placements is None:
        return piece
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = getattr(p, "device_mesh", None)
    whole = DTensor.from_local(piece, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements)
