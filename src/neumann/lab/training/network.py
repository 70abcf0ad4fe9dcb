"""The model as it trains: in one process, copied to several (DDP), or sharded over them (FSDP2)."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.training.batchnorm_layers import has_batchnorm, use_ghost_batches
from neumann.lab.training.processes import Process


@dataclass(frozen=True)
class Network:
    model: nn.Module  # to evaluate and to save
    wrapped: nn.Module  # to compute gradients with: the model itself, or DDP around it
    sharded: bool  # by FSDP2, so that the whole state must be gathered

    def get_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of model and optimizer; all processes must call this."""
        if not self.sharded:
            return {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, state = get_state_dict(self.model, optimizer, options=options)
        return {"model": model, "optimizer": state}

    def load_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
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
            start = "torchrun --nproc-per-node N -m neumann train"
            raise UsageError(f"--fsdp needs several processes: start it with {start}")
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
