"""What measurements return.

Errors are of the loss as it is computed, in its dtype: its rounding in the forward pass makes
another function of it, with a Hessian of its own, and that is the one measured. Where a network
loses many digits on the way, as BatchNorm does on features whose mean is 1e3 standard deviations or
more, this Hessian may be far from that of exact arithmetic and no error here says so. A copy of the
model in float64 shows it.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from neumann.spectrum.operators import About

Ends = Literal["both", "smallest", "largest"]


@dataclass(frozen=True)
class Extreme:
    """An end of a spectrum: λ_min or λ_max. All in units of the matrix."""

    value: float  # the Ritz value at this end; inside the spectrum, so |λ| may be larger
    error: float  # |value − λ| is at most this, except with the run's risk
    residual: float  # ‖Hy − value·y‖: some eigenvalue is this near, before rounding
    tolerance: float  # what the error was to reach; 0: nothing was asked for
    converged: bool  # error ≤ tolerance; or the whole space was searched, with exact products


@dataclass(frozen=True)
class Lanczos:
    """A Lanczos run of k steps. Tensors are float64 on the CPU, but for the vectors."""

    values: Tensor  # (k,) Ritz values, ascending, in units of the matrix
    residuals: Tensor  # (k,) some eigenvalue is this near to each, before rounding
    converged: Tensor  # (k,) bool: residual plus noise within the tolerance, for each as asked
    weights: Tensor  # (k,) shares of the start in each, sum 1: the nodes' weights in a quadrature
    smallest: Extreme
    largest: Extreme
    vectors: Tensor | None  # (2m or fewer, n) Ritz vectors, rows, on the operator's device
    vector_values: Tensor  # (2m or fewer,) the Ritz values that they belong to, ascending
    diagonal: Tensor  # (k,) α of T
    beside: Tensor  # (k,) β of T; the last is what is left over
    steps: int  # k
    products: int  # with the operator; more than k after a breakdown
    restarts: int  # new random directions, each taken at a breakdown
    noise: float  # estimated ‖error of T‖ by products and rounding; part of every error
    risk: float  # probability, of each end, that its error is larger than stated
    about: About


@dataclass(frozen=True)
class Extremes:
    """λ_min and λ_max, and what it took."""

    smallest: Extreme
    largest: Extreme
    steps: int  # of Lanczos
    products: int  # with the operator
    noise: float  # part of both errors that no further step removes, in units of the matrix
    risk: float  # probability, of each end, that its error is larger than stated
    about: About
    ends: Ends = "both"  # that were asked for

    @property
    def converged(self) -> bool:
        """Whether the ends that were asked for are."""
        smallest = self.smallest.converged or self.ends == "largest"
        largest = self.largest.converged or self.ends == "smallest"
        return smallest and largest

    @property
    def outside(self) -> tuple[float, float]:
        """Numbers between which all eigenvalues lie, except with twice the risk."""
        return (
            self.smallest.value - self.smallest.error,
            self.largest.value + self.largest.error,
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers, strings, lists and dicts, for a record."""
        plain = asdict(self)
        plain["about"].update(
            dtype=str(self.about.dtype), device=str(self.about.device), names=list(self.about.names)
        )
        return plain
