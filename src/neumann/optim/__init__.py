"""The optimizer; needs torch alone.

neumann          the class Neumann options          its options: types, defaults, checks phases
warm-up, reset or iterate; μ(t) and the other coefficients of a step update           the equations
of a step, and the container for its tensors distance         r = ‖w − v‖ and the force that depends
on it state            what is kept for each parameter backends         how the update runs;
`backends/base.py` says what a parameter without a gradient gets preconditioners  P, which turns
gradients into directions modes            switching between training and evaluation weights
checkpoint       loading state dicts distributed      parameters spread over processes; `dtensor`:
the part that is here tracing          what torch.compile needs schedules        learning rates (not
μ) guard, batchnorm, diagnostics    helpers around training series, spectral                 old
import paths
"""

from neumann.optim.batchnorm import recalibrate_batchnorm
from neumann.optim.guard import guard
from neumann.optim.neumann import Neumann

__all__ = ["Neumann", "guard", "recalibrate_batchnorm"]
