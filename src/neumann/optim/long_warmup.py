"""A warning if Neumann's SGD warm-up covers most of a run; for schedules, trainers and the lab."""

from torch.optim import Optimizer

from neumann.caller_warnings import warn_caller


def warn_of_long_warmup(optimizer: Optimizer, total_steps: int) -> None:
    """Warn with the message of `describe_long_warmup`, if there is one."""
    message = describe_long_warmup(optimizer, total_steps)
    if message:
        warn_caller(message)


def describe_long_warmup(optimizer: Optimizer, total_steps: int) -> str | None:
    """What to say if Neumann's SGD warm-up covers most of a run; None if it does not."""
    warmup_steps = optimizer.param_groups[0].get("warmup_steps")
    if warmup_steps is None or 2 * warmup_steps <= total_steps:
        return None
    covered = "all" if warmup_steps >= total_steps else "most"
    return (
        f"the optimizer's SGD warm-up of {warmup_steps} steps covers {covered} of the run's "
        f"{total_steps}: lower warmup_epochs or warmup_steps of the optimizer"
    )
