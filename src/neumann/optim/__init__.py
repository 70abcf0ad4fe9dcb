"""The optimizer; needs torch alone.

The mathematics, as pure functions:

    phases           when a step warms up, resets or iterates; μ(t) and the other coefficients
    distance         r = ‖w − v‖, and the force that depends on it
    update           the equations of a step, in their readable form

One step, in the order in which a gradient passes through:

    neumann          class Neumann, the contract of torch.optim
    options          its options: names and types; `defaults`: those that depend on P
    option_checks    what is refused: options out of their ranges, and some parameters
    misuse           errors and warnings for steps that cannot do what their caller wants
    state            what is kept for each parameter
    tensors          the lists w, g, m, δ of a group, from the state to the kernel
    skipping         whether all gradients are finite
    preconditioners  P, from gradients to directions; `__init__` says how to add one
    backends         the update as it runs; `__init__` says how to add one, `base` what it must do
    precision        the dtypes of the arithmetic, and rounding
    strides          whether a tensor fills its memory
    distance_tracker r² from one step to the next, over all processes
    triton_runtime   whether Triton interprets, and how it launches
    interrupts       signals such as Ctrl-C wait while weights are written

Around it:

    modes            training weights w and evaluation weights w − μm
    checkpoint       loading state dicts; `checkpoint_checks` refuses damaged ones
    distributed      parameters spread over processes; `dtensor`: the part that is here
    tracing          what torch.compile needs
    write_watch      a warning if something else writes the weights
    diagnostics      what the optimizer is doing, for logs
    roles            what each parameter of a model is for: hidden matrix, embedding, output, vector
    groups           parameter groups by role, with the P, decay and scale of each
    schedules        learning rates over a run (μ(t) is in `phases`); `lr_rules`: as functions
    long_warmup      a warning if the SGD warm-up covers most of a run
    recipe           groups, optimizer and schedule in one call
    guard            a warning before displaced weights are saved as a model
    batchnorm        statistics for the evaluation weights
    series, spectral old import paths
"""

from neumann.optim.batchnorm import recalibrate_batchnorm
from neumann.optim.groups import param_groups
from neumann.optim.guard import guard
from neumann.optim.neumann import Neumann
from neumann.optim.recipe import large_batch

__all__ = ["Neumann", "guard", "large_batch", "param_groups", "recalibrate_batchnorm"]
