"""Accelerate: the recipe, with a schedule that fits the way Accelerate steps it.

The optimizer that `accelerator.prepare` returns passes `train()` and `eval()` on to Neumann.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from neumann.optim import Neumann, recipe
from neumann.optim.schedules import LinearDecay, PowerDecay

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["large_batch"]


def large_batch(
    accelerator: "Accelerator", model: nn.Module, steps: int, **options: Any
) -> tuple[Neumann, LinearDecay | PowerDecay]:
    """The optimizer and schedule of :func:`neumann.large_batch`, ready to be prepared::

        optimizer, schedule = large_batch(accelerator, model, steps=2_000)
        model, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, loader, schedule
        )

    Args:
        accelerator: unless configured otherwise, it steps a schedule once per process after each
            optimizer step. The schedule is lengthened to match.
        model: before or after `prepare`.
        steps: optimizer steps of the whole run, the same on every process.
        **options: as for `neumann.large_batch`.
    """
    if not hasattr(accelerator, "num_processes"):
        raise TypeError(f"accelerator must be an Accelerator, got {type(accelerator).__name__}")
    linked = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
    calls = accelerator.num_processes if linked else 1
    return recipe.large_batch(model, steps, schedule_calls=calls, **options)
