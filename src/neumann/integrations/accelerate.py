"""Accelerate: the recipe, with a schedule that fits the way Accelerate steps it.

The optimizer that `accelerator.prepare` returns passes `train()` and `eval()` on to Neumann.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from neumann.optim import Neumann, recipe
from neumann.optim.schedules import LinearDecay, PowerDecay
from neumann.validation import is_count, require

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
        accelerator: steps a schedule as often per optimizer step as it has processes, unless it
            was told otherwise. The schedule is made longer accordingly.
        model: before or after `prepare`.
        steps: optimizer steps of the whole run, the same on every process.
        **options: as for `neumann.large_batch`.
    """
    if not hasattr(accelerator, "num_processes"):
        raise TypeError(f"accelerator must be an Accelerator, got {type(accelerator).__name__}")
    require(is_count(steps) and steps >= 1, "steps", steps, "an integer of at least 1")
    linked = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
    times = accelerator.num_processes if linked else 1
    if options.get("weight_decay", recipe.AUTO) == recipe.AUTO:  # for the steps, not the calls
        named = {name: options[name] for name in ("lr", "roles") if name in options}
        options["weight_decay"] = recipe.choose_weight_decay(model, steps, **named)
    return recipe.large_batch(model, times * steps, **options)
