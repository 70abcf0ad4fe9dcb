"""A model in the form in which it trains: its BatchNorm, and copied or sharded over processes.

The bare model stays what is evaluated and saved; `Network.trained` is what a step runs. FSDP2
shards the bare model itself, so there its whole state is gathered to be saved.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from neumann.lab.batchnorm import has_batchnorm, normalise_in_groups
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.processes import Process


@dataclass(frozen=True)
class Network:
    """One model, seen from two sides."""

    model: nn.Module  # to evaluate and to save
    trained: nn.Module  # to run a step with
    sharded: bool

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of model and optimizer; every process has to ask."""
        if not self.sharded:
            return {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, state = get_state_dict(self.model, optimizer, options=options)
        return {"model": model, "optimizer": state}

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take a whole state back."""
        if not self.sharded:
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            self.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


def network(model: nn.Module, config: TrainConfig, process: Process, at_once: int) -> Network:
    """The model as the configuration trains it.

    Args:
        model: on its device, with the same weights in every process.
        at_once: examples that a process takes at once.
    """
    if at_once == 1 and has_batchnorm(model):
        raise UsageError(
            f"BatchNorm in {config.model} needs more than one example at once, and a process "
            "takes 1"
        )
    if config.bn_batch is not None:
        if at_once % config.bn_batch:
            raise UsageError(
                f"--bn-batch {config.bn_batch} does not divide the {at_once} examples that a "
                "process takes at once"
            )
        normalise_in_groups(model, config.bn_batch)
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.fsdp:
        if process.ranks == 1:
            raise UsageError("--fsdp needs several processes: torchrun --nproc-per-node N -m …")
        from torch.distributed.fsdp import fully_shard

        for part in _parts(model):
            fully_shard(part)
        fully_shard(model)
        return Network(model, model, sharded=True)
    if process.ranks == 1:
        return Network(model, model, sharded=False)
    device = next(model.parameters()).device
    # Statistics are averaged before they are used; rank 0's in every step would cost a broadcast.
    copied = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    return Network(model, copied, sharded=False)


def _parts(model: nn.Module) -> list[nn.Module]:
    """What is gathered by itself: the layers, but for those that share weights, which the whole
    model gathers.
    """
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # has no forward pass to gather for
            found += list(child.children())
        else:
            found.append(child)
    owners = Counter(p for part in found for p in part.parameters())
    return [
        part
        for part in found
        if (own := list(part.parameters())) and all(owners[p] == 1 for p in own)
    ]
