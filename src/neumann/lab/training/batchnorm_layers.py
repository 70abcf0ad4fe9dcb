"""BatchNorm in a run: ghost batches, and the running statistics of several processes.

With ghost batches a layer normalizes each group of `--bn-batch` examples by itself. With several
processes a layer sees only the examples of its own, and `average_statistics` gives all of them the
mean of the running statistics.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neumann.lab.training.processes import Process, sum_over_processes


def use_ghost_batches(model: nn.Module, size: int) -> None:
    """Make every BatchNorm layer normalize groups of this many examples in training."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kind = type(module)
            # A subclass keeps what the layer does besides (timm's have an activation), and the
            # names in the state dict.
            module.__class__ = type(f"Ghost{kind.__name__}", (_GhostBatches, kind), {})
            module.ghost_size = size  # type: ignore[assignment]


class _GhostBatches(nn.Module):
    """Mixed into a BatchNorm layer: runs its forward pass group by group in training."""

    ghost_size: int

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or len(inputs) <= self.ghost_size:
            whole: Tensor = super().forward(inputs)
            return whole
        groups = torch.split(inputs, self.ghost_size)  # the last one may be smaller
        return torch.cat([super(_GhostBatches, self).forward(group) for group in groups])


def has_batchnorm(model: nn.Module) -> bool:
    return bool(get_statistics(model))


def get_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means, variances and counters themselves, not copies."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
        for buffer in module.buffers(recurse=False)
    ]


@torch.no_grad()
def set_statistics(model: nn.Module, saved: list[Tensor]) -> None:
    for buffer, value in zip(get_statistics(model), saved, strict=True):
        if buffer.shape != value.shape:
            raise ValueError(f"statistics of shape {buffer.shape} cannot be {value.shape}")
        buffer.copy_(value)


@torch.no_grad()
def average_statistics(model: nn.Module, process: Process) -> None:
    """Replace the running statistics of every process by the mean over all processes."""
    if process.ranks > 1:
        for buffer in get_statistics(model):
            if buffer.is_floating_point():
                sum_over_processes(buffer, process).div_(process.ranks)


@contextlib.contextmanager
def keep_statistics(model: nn.Module) -> Iterator[None]:
    """Restore the running statistics after the block."""
    saved = [buffer.clone() for buffer in get_statistics(model)]
    try:
        yield
    finally:
        set_statistics(model, saved)
