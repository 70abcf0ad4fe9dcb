"""What torch.compile needs of the optimizer, and what cannot be compiled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from neumann.optim import phases
from neumann.optim.state import CLOCK, SKIPPED

_Step = TypeVar("_Step", bound=Callable[..., Any])

EVALUATION_MODE = (
    "step() in evaluation mode would update the wrong weights: call optimizer.train() first"
)


class HasStepped:
    """Whether the optimizer has stepped, for a scheduler that is stepped too early.

    torch's schedulers wrap step() to record that in an attribute. A tracer cannot look into that
    wrapper, nor write an optimizer's attributes; `without_scheduler_wrapper` and this class avoid
    both.
    """

    def __get__(self, optimizer: Any, owner: type) -> bool:
        store = getattr(optimizer, "_store", None)
        scalars = {} if store is None else store.scalars
        return any(int(scalars[key]) > 0 for key in (CLOCK, SKIPPED) if key in scalars)


def without_scheduler_wrapper(step: _Step) -> _Step:
    """Tell torch's schedulers that step() needs no wrapper."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def treat_reset_table_as_constant() -> None:
    """Make the compiler treat the table of resets as a constant.

    As a decorator this would import the compiler with the package. Building an optimizer imports it
    anyway.
    """
    torch.compiler.assume_constant_result(phases.reset_table)  # type: ignore[no-untyped-call]


def refuse_untraceable(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Any], sharded: bool
) -> None:
    """Raise for what only an eager step can do."""
    options = groups[0]
    if sharded:
        raise RuntimeError(
            "a step whose parameters are divided among processes adds up their distances, which "
            "cannot be compiled: call optimizer.step() uncompiled"
        )
    if not options["training"]:
        raise RuntimeError(EVALUATION_MODE)
    if options["differentiable"]:
        raise RuntimeError(
            "a step with differentiable=True cannot be compiled: autograd records it as it runs, "
            "so call optimizer.step() uncompiled"
        )
    if options["skip_nonfinite"] and distributed.is_available() and distributed.is_initialized():
        raise RuntimeError(
            "a step with skip_nonfinite=True asks all processes whether a gradient overflowed, "
            "which cannot be compiled: call optimizer.step() uncompiled or set "
            "skip_nonfinite=False"
        )
    for index, group in enumerate(groups):
        for number, p in enumerate(group["params"]):
            if (p.requires_grad or p.grad is not None) and p not in states:
                raise RuntimeError(
                    f"parameter {number} of group {index} was frozen until now and has no state, "
                    "which a compiled step cannot create: call optimizer.step() uncompiled once"
                )
