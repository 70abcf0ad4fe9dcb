"""Products with the Hessian from gradients alone, by central differences.

    Hv ≈ (∇loss(w + hv) − ∇loss(w − hv)) / 2h

This works for models without second derivatives, and for parameters sharded by FSDP; then every
rank holds whole vectors, and all ranks need the same number of batches. With ‖v‖ = 1 the truncation
error is h²/6 times a fourth derivative of the loss, and rounding adds eps/h times the size of a
gradient, so the best h is proportional to ∛eps. The weights round h as well, each by eps times its
size; therefore h grows to ∛(eps²)·‖w‖ where that is larger, and the difference is divided by the
step that the rounded weights really took along v. If the loss has kinks (ReLU), the result is the
curvature at the scale h.

`product_error` compares products with steps h and 2h, which differ by three times the truncation
error of the former, in a random direction and in the direction the matrix maps it to.

A kink is a jump J of the gradient. If a step crosses one, the product is wrong by J/2h: far more
than the curvature, and often along v itself, so that no asymmetry shows it. With 2h it is wrong by
J/4h. `lanczos` compares the two, by `second_product`, along the Ritz vectors of both ends.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn

from neumann.spectrum.operators.loss_curvature import CurvatureOperator
from neumann.spectrum.operators.model_state import preserve_weights
from neumann.spectrum.operators.objective import Loss
from neumann.spectrum.operators.vectors import random_unit, scalar_dtype
from neumann.validation import require

Tensors = Sequence[Tensor]
MAX_DEVIATION = 0.1  # the largest part of a step that rounding may move off its direction


class Differences(CurvatureOperator):
    """The Hessian of the mean loss, by central differences of gradients.

    Args:
        step: h for a unit vector; by default ∛eps of the dtype, more if the weights are large.

    All other arguments are those of :class:`CurvatureOperator`.
    """

    matrix = "hessian by differences"
    has_second_product = True

    def __init__(
        self, model: nn.Module, loss: Loss, *, step: float | None = None, **options: Any
    ) -> None:
        super().__init__(model, loss, **options)
        self.step = step  # None: chosen in each session, from the weights
        require(step is None or 0 < step < math.inf, "step", step, "finite and above 0")
        self._sharded = any(hasattr(p, "placements") for p in self.parameters)
        if self._sharded and self.process_group is None:
            raise ValueError(
                "sharded parameters need process_group=, the ranks over which they are sharded"
            )
        self._session_step: float | None = None

    def _release(self) -> None:
        self._session_step = None

    def _copy_in_float64(self) -> Self:
        twin = super()._copy_in_float64()
        twin._session_step = None
        return twin

    def _local_product(self, vector: Tensor) -> Tensor:
        return self._difference(vector, self._choose_step())

    def second_product(self, vector: Tensor) -> Tensor:
        """Return the product with twice the step, where a kink within the step counts half."""
        with self.session():
            total = self._check_first(lambda: self._difference(vector, 2 * self._choose_step()))
            self._sum_over_ranks(total)
            if self.weight_decay:
                total.add_(vector, alpha=self.weight_decay)
            return total

    def _sum_over_ranks(self, total: Tensor) -> None:
        if not self._sharded:  # FSDP has already summed the gradients of sharded parameters
            super()._sum_over_ranks(total)

    def _choose_step(self) -> float:
        """Return h for a unit vector in this session, large enough to survive rounding."""
        if self._session_step is None:
            self._session_step = self.step
        if self._session_step is None:
            wide = scalar_dtype(self.device)
            squares = [_local_part(p).square().sum(dtype=wide) for p in self.parameters]
            weight_norm = float(self._sum_over_shards(torch.stack(squares).sum())) ** 0.5
            root: float = torch.finfo(self.dtype).eps ** (1 / 3)
            self._session_step = root * max(1.0, root * weight_norm)
        return self._session_step

    def _measure_product_error(self) -> float:
        first = random_unit(self.size, 0, self.dtype, self.device)
        error, product = self._error_along(first)
        length = float(torch.linalg.vector_norm(product))
        if length > 0:
            error = max(error, self._error_along(product / length)[0])
        truncation = float(self.agree(torch.tensor(error, dtype=torch.float64)))
        return truncation if self._sharded else max(truncation, self._measure_float32_error())

    def _error_along(self, unit: Tensor) -> tuple[float, Tensor]:
        """Return the difference between the products with h and 2h, and the former."""
        near = self._check_first(lambda: self._difference(unit, self._choose_step()))
        both = torch.stack([near, self._difference(unit, 2 * self._choose_step())])
        self._sum_over_ranks(both)
        return float(torch.linalg.vector_norm(both[1] - both[0])), both[0]

    def _difference(self, vector: Tensor, step: float) -> Tensor:
        length = float(torch.linalg.vector_norm(vector))
        if length == 0:
            return torch.zeros_like(vector)
        pieces = self.layout.split(vector)
        directions = [_shard_like(p, v) for p, v in zip(self.parameters, pieces, strict=True)]
        gradients, steps = [], []
        with preserve_weights(self.parameters) as before:
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for p, w, v in zip(self.parameters, before, directions, strict=True):
                        p.copy_(w.add(v, alpha=sign * step / length))
                    steps.append(_measure_step(self.parameters, before, directions, sign))
                gradients.append(self._gradient())
        along, squared = self._sum_over_shards(steps[0] + steps[1])
        if self._passes.checking:
            deviation = 1 - along**2 / (2 * squared * length**2)  # NaN if nothing moved
            if not deviation <= MAX_DEVIATION**2:
                raise ValueError(
                    f"step={step:g} is lost in the rounding of the weights, which are too large "
                    "for it; pass a larger step, or None to choose it from the weights"
                )
        return gradients[0].sub_(gradients[1]).div_(along / length**2)

    def _sum_over_shards(self, numbers: Tensor) -> Tensor:
        if self._sharded:
            distributed.all_reduce(numbers, group=self.process_group)
        return numbers

    def _gradient(self) -> Tensor:
        """Return the gradient of this rank's part of the mean loss; of all of it if sharded."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, piece in enumerate(self.pieces):
            with torch.enable_grad():
                loss = self._compute_loss(index) * (piece.examples / self.examples)
                total.add_(self._gradient_of(loss))
        return total

    def _gradient_of(self, loss: Tensor) -> Tensor:
        if not self._sharded:
            return super()._gradient_of(loss)
        for p in self.parameters:
            p.grad = None  # the session restores it
        (loss * self.about.ranks).backward()  # type: ignore[no-untyped-call]  # FSDP averages
        gradients: list[Any] = [p.grad for p in self.parameters]
        return self.layout.join(
            [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
        )


def _measure_step(parameters: Tensors, before: Tensors, directions: Tensors, sign: float) -> Tensor:
    """Return (step·direction, ‖step‖²) of the step the local weights really took."""
    wide = scalar_dtype(before[0].device)
    parts = []
    for p, w, v in zip(parameters, before, directions, strict=True):
        step = _local_part(p - w)
        product = sign * (step * _local_part(v)).sum(dtype=wide)
        parts.append(torch.stack([product, step.square().sum(dtype=wide)]))
    return torch.stack(parts).sum(0)


def _local_part(tensor: Tensor) -> Tensor:
    to_local: Any = getattr(tensor.detach(), "to_local", tensor.detach)
    found: Tensor = to_local()
    return found


def _shard_like(p: Tensor, piece: Tensor) -> Tensor:
    """Shard a piece of the flat vector like the parameter."""
    placements: Any = getattr(p, "placements", None)
    if placements is None:
        return piece
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = getattr(p, "device_mesh", None)
    whole = DTensor.from_local(piece, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements)
