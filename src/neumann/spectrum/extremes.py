"""λ_min and λ_max of a matrix, each with an error.

One Lanczos run from a random start finds both ends, see `lanczos`; with the defaults it goes on
until both are within 1e-3·max|λ|, whatever the spectrum looks like, except with a probability of
`risk` for each. An end that has not converged within the budget says so and still has an error that
holds.
"""

from torch import Tensor

from neumann.spectrum.lanczos import Observe, Scale, lanczos
from neumann.spectrum.operators import Operator
from neumann.spectrum.results import Ends, Extremes


def extremes(
    operator: Operator,
    *,
    tolerance: float = 1e-3,
    relative_to: Scale = "largest",
    ends: Ends = "both",
    max_products: int = 400,
    seed: int = 0,
    start: Tensor | None = None,
    risk: float = 1e-3,
    host: bool = False,
    observe: Observe | None = None,
) -> Extremes:
    """The ends of the operator's spectrum; the arguments are those of :func:`lanczos`."""
    run = lanczos(
        operator,
        tolerance=tolerance,
        relative_to=relative_to,
        ends=ends,
        max_products=max_products,
        seed=seed,
        start=start,
        risk=risk,
        host=host,
        observe=observe,
    )
    return Extremes(
        run.smallest, run.largest, run.steps, run.products, run.noise, run.risk, run.about, ends
    )
