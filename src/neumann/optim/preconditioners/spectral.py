"""The spectral preconditioner: momentum, then the orthogonal matrix nearest to the gradient's.

For G = UΣVᵀ it gives UVᵀ: every singular direction of a layer's gradient counts the same, whatever
its singular value. This is Shampoo's (GGᵀ)^{-1/4} G (GᵀG)^{-1/4} without memory.

An orthogonal matrix of m outputs and n inputs has elements of root mean square 1/√max(m, n), and
every singular value is 1. Two scalings are in use:

    "rms"    √max(m, n)    all directions have the same root mean square, as Adam's have
    "norm"   √(m/n)        all directions change a layer's outputs by the same amount

With "norm", n of a convolution is not its in·kh·kw but in·√(kh·kw): neighboring pixels are alike,
and the layer can take the larger steps (docs/tuning.md has the measurement).

Biases and normalization parameters get the diagonal preconditioner, scaled to the same root mean
square, so that one learning rate suits all tensors. So do matrices of one row or column with "rms".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from neumann.optim.preconditioners.batch_plan import compute_scale, orthogonalize_planned
from neumann.optim.preconditioners.diagonal import Diagonal
from neumann.optim.preconditioners.matrix_view import WHOLE, MatrixView
from neumann.optim.preconditioners.momentum import Momentum
from neumann.optim.preconditioners.orthogonalization import (
    count_operations,
    is_matrix,
    orthogonalize_batches,
    orthogonalize_many,
)
from neumann.optim.preconditioners.protocol import Preconditioner, States, is_preconditioner
from neumann.validation import require, require_positive

Scaling = Literal["rms", "norm"]
VECTOR = "vector_"  # prefix of the state that `vectors` keeps


@dataclass(frozen=True)
class Spectral:
    """UVᵀ of matrices; a convolution counts as a matrix out × (in·kh·kw). `vectors` for all others.

    With a `view`, every parameter holds one or more matrices, as the view says.
    """

    scale: float = 0.2  # root mean square of a direction, or its norm
    vectors: Preconditioner = field(default_factory=Diagonal)  # P of what is not a matrix
    before: Preconditioner | None = field(default_factory=Momentum)  # applied first
    view: MatrixView = WHOLE  # where the matrices of a parameter are
    scaling: Scaling = "rms"  # what `scale` is: "rms" of the elements, or "norm" by shape

    name = "spectral"

    def __post_init__(self) -> None:
        require_positive("scale", self.scale)
        known = self.scaling in get_args(Scaling)
        require(known, "scaling", self.scaling, " or ".join(map(repr, get_args(Scaling))))
        for option, given in (("vectors", self.vectors), ("before", self.before)):
            if not is_preconditioner(given) and (given is not None or option == "vectors"):
                raise ValueError(f"{option} must be a Preconditioner, got {given!r}")
        if getattr(self.vectors, "before", None) is not None:
            raise ValueError(
                f"vectors={self.vectors!r} has a `before` of its own, which would never run: pass "
                "it as `before` of Spectral, which acts on vectors too"
            )

    def __repr__(self) -> str:
        """A checkpoint names P by this; the view is left out where there is none, as in 0.1."""
        more = "" if self.view == WHOLE else f", view={self.view!r}"
        more += "" if self.scaling == "rms" else f", scaling={self.scaling!r}"
        return f"Spectral(scale={self.scale}, vectors={self.vectors}, before={self.before}{more})"

    def elementwise(self, parameter: Tensor) -> bool:
        """True unless the parameter is a matrix."""
        return self.view == WHOLE and not self._is_matrix(parameter)

    def is_separable(self, parameter: Tensor) -> bool:
        """Whether the first dimension counts matrices, as it does for stacked experts."""
        return self.view.stacked

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """Nothing for a matrix: its direction depends on the gradient alone."""
        if not self.elementwise(parameter):
            self.view.split(parameter)  # raises if the parameter holds no such matrices
            return {}
        return {VECTOR + key: value for key, value in self.vectors.create(parameter).items()}

    def count_operations(self, parameter: Tensor) -> int:
        """Those of all its matrices; see `orthogonalization.count_operations`."""
        batches = self.view.split(torch.empty(parameter.shape, device="meta"))
        return sum(len(b) * count_operations(b.shape[1], b.shape[2:].numel()) for b in batches)

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        if self.view != WHOLE:
            return self._orthogonalize(gradients)
        rest: dict[int, dict[str, Tensor]] = {}
        for index, (gradient, state) in enumerate(zip(gradients, states, strict=True)):
            own = vector_state(state)  # also of a complex vector, which looks like a matrix here
            if own or not self._is_matrix(gradient):
                rest[index] = own
        matrices = [i for i in range(len(gradients)) if i not in rest]
        directions = self._orthogonalize([gradients[i] for i in matrices])
        if not rest:
            return directions
        found = dict(zip(matrices, directions, strict=True))
        others = self.vectors.apply([gradients[i] for i in rest], list(rest.values()))
        found.update(zip(rest, others, strict=True))
        return [found[i] for i in range(len(gradients))]

    def _orthogonalize(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The scaled UVᵀ of the matrices in each gradient."""
        if not torch.compiler.is_compiling():
            planned = orthogonalize_planned(gradients, self.view, self.scale, self.scaling)
            if planned is not None:
                return planned
        if self.view != WHOLE:
            return self._orthogonalize_view(gradients)
        found = orthogonalize_many(dict(enumerate(gradients)))
        if found:
            scales = [self._compute_scale(g.shape) for g in gradients]
            torch._foreach_mul_([found[i] for i in range(len(gradients))], scales)
        return [found[i] for i in range(len(gradients))]

    def _is_matrix(self, tensor: Tensor) -> bool:
        """With "norm", one row or one column is a matrix too, with one singular value."""
        if self.scaling == "norm":
            return tensor.ndim >= 2 and tensor.numel() > 0 and not tensor.is_complex()
        return is_matrix(tensor)

    def _orthogonalize_view(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize each matrix that the view finds, and put them back together."""
        split = [self.view.split(gradient) for gradient in gradients]
        batches = dict(enumerate(batch for parts in split for batch in parts))
        tall = {i for i, b in batches.items() if b.shape[1] > b[0, 0].numel()}
        wide = {
            i: batch.flatten(2).mT if i in tall else batch.flatten(2)
            for i, batch in batches.items()
        }
        found = orthogonalize_batches(wide)
        scales = [self._compute_scale(batches[i].shape[1:]) for i in found]
        torch._foreach_mul_(list(found.values()), scales)
        directions, position = [], 0
        for gradient, parts in zip(gradients, split, strict=True):
            results = []
            for batch in parts:
                result = found[position].mT if position in tall else found[position]
                results.append(result.reshape(batch.shape))
                position += 1
            directions.append(torch.empty_like(gradient).copy_(self.view.join(results, gradient)))
        return directions

    def _compute_scale(self, shape: torch.Size) -> float:
        return compute_scale(self.scale, self.scaling, shape)


def vector_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `vectors` remembers of a parameter; nothing for a matrix."""
    return {key[len(VECTOR) :]: value for key, value in state.items() if key.startswith(VECTOR)}
