"""Parameters spread over processes: the one number that needs all of them.

With FSDP2 a parameter is a DTensor, of which each process holds a shard. With ZeRO or pipeline
stages each process holds some parameters whole. Every step works on local tensors (`dtensor`). Only
the distance r² = Σ‖δ‖² needs the other processes, so each step starts with one all-reduce of a
scalar for every mesh dimension that anything is sharded over. Dimensions over which a parameter is
replicated add nothing, so nothing is counted twice. The flag that a gradient is not finite travels
with the scalar, and along replicated dimensions too: replicas skip a step together or not at all.

Between two steps a process knows its own share of r². That share is useless to a run with other
shards, so it is never saved. After a load it is measured in the same order of summation as in
a step, so that the same shards give the same bits.

Under a preconditioner matrices travel too: `preconditioners.journey`.

If not all processes call step(), the others wait forever.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from neumann.optim.distance import scalar_dtype
from neumann.optim.dtensor import is_dtensor
from neumann.optim.tensors import Tensors


class Totals(NamedTuple):
    """What the processes learn from each other before a step."""

    squared: Tensor  # r²
    variables: int | None  # of the whole process group; None: there is none
    flags: Tensor | None  # not zero: a gradient somewhere is not finite


class Sharding:
    """How the parameters of one optimizer are spread over processes.

    The squares of parameters that are sharded over the same process groups add up to one sum.

    Args:
        parameters: all of them, in any order. Plain ones are replicas, unless there is a process
            group.
        process_group: of the processes among which whole parameters are divided.
    """

    def __init__(self, parameters: Sequence[Tensor], process_group: Any) -> None:
        self._process_group = process_group
        self._sum_of: dict[Tensor, int] = {}
        known: dict[tuple[int, ...], Any] = {}
        numbers: dict[tuple[tuple[int, ...], ...], int] = {}  # of the sums
        for p in parameters:
            # Compare groups by their ranks: equal meshes may come with different group objects.
            over: list[tuple[int, ...]] = []
            for group, is_sharded in _groups_of(p):
                ranks = tuple(distributed.get_process_group_ranks(group))
                known.setdefault(ranks, group)
                if is_sharded:
                    over.append(ranks)
            self._sum_of[p] = numbers.setdefault(tuple(over), len(numbers))
        # Each process group with the sums that it shares, none among replicas, in the order of the
        # mesh dimensions, which all processes must follow.
        self._members = [
            (group, [number for over, number in numbers.items() if ranks in over])
            for ranks, group in known.items()
        ]
        device = find_communication_device(parameters, process_group)
        # Σδ² over what this process holds, after the last step.
        self.sums = torch.zeros(max(len(numbers), 1), dtype=scalar_dtype(device), device=device)
        self.sums_are_known = True

    def split(self, groups: list[Tensors]) -> list[Tensors]:
        """The groups in pieces whose squares go into one sum each."""
        if len(self.sums) == 1:
            return groups
        pieces = []
        for group in groups:
            numbers = [self._sum_of[p] for p in group.parameters]
            for number in sorted(set(numbers)):
                chosen = [other == number for other in numbers]
                pieces.append(group.select(chosen, sum_number=number))
        return pieces

    def reduce(self, variables: int, flag: Tensor | None) -> Totals:
        """Add up over all processes; one all-reduce for each process group that shares anything.

        The numbers and their order are always the same, whatever changed on one process alone:
        otherwise the processes would wait for each other.
        """
        carried = [] if flag is None else [flag.reshape(1).to(self.sums)]
        values = torch.cat([self.sums, *carried])
        count = len(self.sums)
        for group, numbers in self._members:
            members = [*numbers, *range(count, len(values))]
            if not members:  # replicas, and nobody asks for the flag
                continue
            if len(members) == len(values):
                distributed.all_reduce(values, group=group)
            else:
                some = values[members]
                distributed.all_reduce(some, group=group)
                values[members] = some
        squared, flags = values[:count].sum(), values[count:].sum()
        total = None
        if self._process_group is not None:
            # Other processes may have other sums, so they share only the totals.
            number = torch.full_like(squared, variables)
            values = torch.stack([squared, flags, number])
            distributed.all_reduce(values, group=self._process_group)
            squared, flags, number = values.unbind()
            total = int(number) or 1
        return Totals(squared, total, None if flag is None else flags)


def find_sharding(parameters: Sequence[Tensor], process_group: Any) -> Sharding | None:
    """The sharding of these parameters; None if every process has all of them whole."""
    for p in parameters:
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise RuntimeError(
                "the parameters belong to FullyShardedDataParallel (FSDP1), whose flat shards do "
                "not say which parameters they are parts of, so r cannot be computed: use "
                "torch.distributed.fsdp.fully_shard (FSDP2; in Accelerate fsdp_version=2)"
            )
    spread = process_group is not None or any(map(is_dtensor, parameters))
    return Sharding(parameters, process_group) if spread else None


def require_group(process_group: Any) -> None:
    """Raise unless this is None or a process group that this process belongs to."""
    if process_group is None:
        return
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed group that this process belongs to, got "
            f"{process_group!r}"
        )


def reshard_models() -> None:
    """Make FSDP2 gather weights again that were changed behind its back.

    After a forward pass without a backward pass FSDP2 keeps the root module's gathered weights, and
    would use them although the shards have changed. The optimizer does not know its model, so every
    FSDP module of the process frees its gathered weights.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    registry = sys.modules.get("torch.distributed._composable_state")
    if fsdp is None or registry is None:
        return
    for module in list(registry._module_state_mapping):  # torch's own list of such modules
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


class SharedGroup:
    """A process group on its way into a copy of the optimizer, which shares it."""

    __slots__ = ("group",)

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedGroup":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer with a process group cannot be pickled, because the group means nothing "
            "in another process: save its state_dict()"
        )


def _groups_of(parameter: Any) -> list[tuple[Any, bool]]:
    """The process group of each dimension of a parameter's mesh; True: the parameter is sharded."""
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        (mesh.get_group(dimension), not placement.is_replicate())
        for dimension, placement in enumerate(parameter.placements)
    ]


def find_communication_device(parameters: Sequence[Any], process_group: Any) -> torch.device:
    """Where processes exchange scalars; with offloaded shards that is not where the shards are."""
    for p in parameters:
        if is_dtensor(p) and p.device_mesh.device_type != "cpu":
            return torch.device(p.device_mesh.device_type)
    if not parameters and distributed.get_backend(process_group) == "nccl":
        return torch.device("cuda")
    return parameters[0].device if parameters else torch.device("cpu")
