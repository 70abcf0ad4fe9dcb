"""BatchNorm in a run: ghost batches, and the running statistics of several processes.

With ghost batches a layer normalizes each group of `--bn-batch` examples by itself. With several
processes a layer sees only the examples of its own, and `average_statistics` gives all of them the
mean of the running statistics.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neumann.lab.training.processes import Process, sum_over_processes


def use_ghost_batches(model: nn.Module, size: int) -> None:
    """Make every BatchNorm layer normalize groups of this many examples in training."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kind: Any = type(module)
            module.__class__ = _make_ghost_kind(kind, size)


@functools.cache  # a compiler takes a new class for new code, and gives up after a few runs
def _make_ghost_kind(kind: Any, size: int) -> Any:
    """A subclass keeps what the layer does besides (timm's have an activation), and its names in
    the state dict."""
    own = {"ghost_size": size, "following": _list_following(kind)}
    return type(f"Ghost{kind.__name__}", (_GhostBatches, kind), own)


class _GhostBatches(nn.Module):
    """Mixed into a BatchNorm layer: normalizes group by group in training.

    On a GPU, and where the network is compiled, all groups are normalized at once: one by one they
    would take many small kernels. Elsewhere one by one is faster: a group fits into a CPU's caches.
    """

    ghost_size: int
    following: tuple[str, ...] | None  # the parts that the layer applies after it has normalized

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or len(inputs) <= self.ghost_size:
            whole: Tensor = super().forward(inputs)
            return whole
        at_once = torch.compiler.is_compiling() or inputs.is_cuda
        if at_once and self.following is not None and len(inputs) % self.ghost_size == 0:
            normalized = normalize_groups(self, inputs, self.ghost_size)
            for name in self.following:
                normalized = getattr(self, name)(normalized)
            return normalized
        groups = torch.split(inputs, self.ghost_size)  # the last one may be smaller
        return torch.cat([super(_GhostBatches, self).forward(group) for group in groups])


def _list_following(kind: type[_BatchNorm]) -> tuple[str, ...] | None:
    """Name what a kind of layer applies after it has normalized; None if that is unknown."""
    if kind.forward is _BatchNorm.forward:
        return ()
    timm = kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")
    return ("drop", "act") if timm else None


def normalize_groups(layer: Any, inputs: Tensor, size: int) -> Tensor:
    """Do what a BatchNorm layer does in training, for each group of `size` examples, all at once.

    A group's scale and shift are tensors of their own, so that a backward pass sums over the
    examples of a group only, in one pass over memory, and the rest is small.
    """
    grouped = inputs.view(-1, size, *inputs.shape[1:])  # (groups, size, channels, …)
    grouped = grouped.to(torch.promote_types(inputs.dtype, torch.float32))
    over = (1, *range(3, grouped.ndim))
    var, mean = torch.var_mean(grouped, over, correction=0, keepdim=True)
    if layer.training and layer.track_running_stats:
        count = grouped.numel() // mean.numel()
        _track(layer, mean.detach(), var.detach() * (count / (count - 1)))
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is None:
        normalized = (grouped - mean) * scale
    else:
        ones = (1,) * (grouped.ndim - 3)
        weight, bias = (p.view(-1, *ones).expand_as(scale) for p in (layer.weight, layer.bias))
        normalized = (grouped - mean) * (scale * weight) + bias
    return normalized.flatten(0, 1).to(inputs.dtype)


@torch.no_grad()
def _track(layer: Any, mean: Tensor, var: Tensor) -> None:
    """Update the running statistics as the groups would one after the other."""
    groups, channels = mean.shape[0], mean.shape[2]
    layer.num_batches_tracked.add_(groups)
    for running, found in ((layer.running_mean, mean), (layer.running_var, var)):
        found = found.view(groups, channels).to(running.dtype)
        if layer.momentum is None:  # the mean over all groups so far
            running.add_((found - running).sum(0) / layer.num_batches_tracked)
            continue
        kept = 1 - layer.momentum
        # How many groups follow each. Made on the device, since a CUDA graph may be recording.
        later = torch.arange(groups - 1, -1, -1, dtype=running.dtype, device=running.device)
        shares = layer.momentum * kept**later
        running.mul_(kept**groups).add_((shares[:, None] * found).sum(0))


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
            raise ValueError(f"statistics must have shape {buffer.shape}, got {value.shape}")
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
