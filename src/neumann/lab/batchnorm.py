"""BatchNorm in training: over how many examples it normalises, and whose statistics it keeps.

With ghost batches a layer normalises each group of `size` examples by itself, as if they came one
after the other; its running statistics see one group after the other too. Over several processes
each layer has seen only its own examples; `average_statistics` makes the running statistics those
of all.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neumann.lab.processes import Process, added_up


def normalise_in_groups(model: nn.Module, size: int) -> None:
    """Have every BatchNorm layer of the model normalise groups of this many examples."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kind = type(module)
            # A subclass, so that layers which do more than normalise (timm's) keep doing it and
            # the names in the state dict stay.
            module.__class__ = type(f"Ghost{kind.__name__}", (_Ghost, kind), {})
            module.ghost_size = size  # type: ignore[assignment]


class _Ghost(nn.Module):
    """Mixed into a BatchNorm layer: its own forward pass, group by group in training."""

    ghost_size: int

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalised; a rest smaller than a group is a group."""
        if not self.training or len(inputs) <= self.ghost_size:
            whole: Tensor = super().forward(inputs)
            return whole
        groups = torch.split(inputs, self.ghost_size)
        return torch.cat([super(_Ghost, self).forward(group) for group in groups])


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model keeps running statistics."""
    return any(_keeps_statistics(module) for module in model.modules())


def statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances and the counters, as they stand in the model."""
    return [
        buffer
        for module in model.modules()
        if _keeps_statistics(module)
        for buffer in module.buffers(recurse=False)
    ]


@torch.no_grad()
def average_statistics(model: nn.Module, process: Process) -> None:
    """Give every process the mean of all processes' running statistics."""
    if process.ranks > 1:
        for buffer in statistics(model):
            if buffer.is_floating_point():
                added_up(buffer, process).div_(process.ranks)


@contextlib.contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """The running statistics come back after the block."""
    saved = [buffer.clone() for buffer in statistics(model)]
    try:
        yield
    finally:
        restore_statistics(model, saved)


@torch.no_grad()
def restore_statistics(model: nn.Module, saved: list[Tensor]) -> None:
    """Put running statistics back that `statistics` gave."""
    for buffer, before in zip(statistics(model), saved, strict=True):
        buffer.copy_(before)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.track_running_stats
