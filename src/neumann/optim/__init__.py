"""The optimizer; needs torch alone.

The mathematics, free of any optimizer:

    phases           when a step warms up, resets or iterates; μ(t) and the other coefficients
    distance         r = ‖w − v‖, and the force that depends on it
    update           the equations of a step, in the form for reading

One step, in the order in which a gradient passes through:

    neumann          class Neumann, the contract of torch.optim
    options          its options: types, defaults, checks
    state            what is kept for each parameter; gathers the `tensors` of a step
    skipping         whether all gradients are finite
    preconditioners  P, from gradients to directions; `__init__` says how to add one
    backends         the update as it runs; `__init__` says how to add one, `base` what it must do.
                     A parameter without a gradient stays put; a reset zeroes its m, δ counts in r
    precision        the dtypes of the arithmetic, and rounding
    distance_tracker r² from one step to the next, over all processes

Around it:

    modes            training weights w and evaluation weights w − μm
    checkpoint       loading state dicts
    distributed      parameters spread over processes; `dtensor`: the part that is here
    tracing          what torch.compile needs
    write_watch      a warning if something else writes the weights
    diagnostics      what the optimizer is doing, for logs
    schedules        learning rates (not μ)
    guard            a warning before displaced weights are saved as a model
    batchnorm        statistics for the evaluation weights
    series, spectral old import paths
"""

from neumann.optim.batchnorm import recalibrate_batchnorm
from neumann.optim.guard import guard
from neumann.optim.neumann import Neumann

__all__ = ["Neumann", "guard", "recalibrate_batchnorm"]
