"""The model in the form in which it trains: its BatchNorm, and copies or shards over processes.

With ghost batches a BatchNorm layer normalizes each group of `--bn-batch` examples by itself. With
several processes a layer sees only the examples of its own, and `average_statistics` gives all of
them the mean of the running statistics.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.training.processes import Process, sum_over_processes


@dataclass(frozen=True)
class Network:
    model: nn.Module  # to evaluate and to save
    trained: nn.Module  # to run a step with; may be the same
    sharded: bool  # by FSDP2, so that the whole state must be gathered

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of model and optimizer; all processes must call this."""
        if not self.sharded:
            return {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, state = get_state_dict(self.model, optimizer, options=options)
        return {"model": model, "optimizer": state}

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if not self.sharded:
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(full_state_dict=True)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, optimizer, **states, options=options)


def wrap_model(model: nn.Module, config: TrainConfig, process: Process, at_once: int) -> Network:
    """Prepare a model, the same in every process, to train on `at_once` examples at once."""
    if at_once == 1 and has_batchnorm(model):
        raise UsageError(f"BatchNorm in {config.model} needs more than one example at once, got 1")
    if config.bn_batch is not None:
        if at_once % config.bn_batch:
            examples = f"{at_once} examples that a process takes at once"
            raise UsageError(f"--bn-batch {config.bn_batch} does not divide the {examples}")
        use_ghost_batches(model, config.bn_batch)
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.fsdp:
        if process.ranks == 1:
            raise UsageError("--fsdp needs several processes: torchrun --nproc-per-node N -m …")
        from torch.distributed.fsdp import fully_shard

        for part in _find_shardable_parts(model):
            fully_shard(part)
        fully_shard(model)
        return Network(model, model, sharded=True)
    if process.ranks == 1:
        return Network(model, model, sharded=False)
    device = next(model.parameters()).device
    # Statistics are averaged before they are used; broadcasting them every step would cost time.
    copied = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    return Network(model, copied, sharded=False)


def _find_shardable_parts(model: nn.Module) -> list[nn.Module]:
    """Return the layers to shard one by one, without those that share weights with another."""
    found: list[nn.Module] = []
    for child in model.children():
        # A list of modules has no forward pass to hook into.
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)
        found += child.children() if listed else [child]
    owners = Counter(p for part in found for p in part.parameters())
    owned = [[owners[p] for p in part.parameters()] for part in found]
    return [part for part, counts in zip(found, owned, strict=True) if set(counts) == {1}]


# ---------------------------------------------------------------------- BatchNorm


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
