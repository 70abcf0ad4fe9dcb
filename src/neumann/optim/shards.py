"""Parameters spread over processes: the part that is here, and the one number that needs them all.

With FSDP2 a parameter is a DTensor, of which each process holds a shard; with ZeRO or pipeline
stages each process holds some parameters whole. Every step works on local tensors. Only the
distance needs the others, r² = Σ‖δ‖² over all of them, so each step starts with one all-reduce of
a scalar for every mesh dimension that anything is sharded over, and the flag that a gradient is
not finite travels with it. A dimension over which a parameter is replicated adds nothing, so
nothing is counted twice.

What a process knows of r² between two steps is its own share, and nobody's share is of use to a
run with other shards. It is therefore never saved, but measured anew after a load, in the order of
additions that the steps have, so that the same shards give the same bits.

It fails where the processes do not all call step(), which then waits for the missing.
"""

import gc
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from neumann.optim.distance import scalar_dtype
from neumann.optim.execution import Work


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is spread over a mesh; nobody has one who has not imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Any:
    """The part of a tensor that this process holds, to be read or written in place."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # which gives the very tensor, not a view with a history
        part = tensor.to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective may still be under way


def local_gradient(gradient: Any, parameter: Any) -> Any:
    """The part of a gradient that belongs to this process's part of the parameter."""
    if gradient is not None and is_dtensor(gradient):
        if tuple(gradient.placements) != tuple(parameter.placements):
            gradient = gradient.redistribute(placements=parameter.placements)
        return local(gradient)
    return gradient


def as_part_of(part: Tensor, like: Any) -> Any:
    """The tensor whose local part is given, spread as another is."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,  # which would compare replicas, with a collective
        shape=like.shape,
        stride=like.stride(),
    )


def placed_like(tensor: Any, parameter: Any) -> Any:
    """A loaded tensor, spread as the parameter is; on a parameter that is not, the whole of it."""
    if not is_dtensor(parameter):
        return tensor.full_tensor() if is_dtensor(tensor) else tensor
    if is_dtensor(tensor):
        return tensor.redistribute(parameter.device_mesh, parameter.placements)
    from torch.distributed.tensor import distribute_tensor

    whole = tensor.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


class Met(NamedTuple):
    """What the processes learn from each other before a step."""

    squared: Tensor  # r²
    variables: int  # of all processes among which whole parameters were divided
    flags: Tensor | None  # not zero: a gradient somewhere is not finite


class Shards:
    """The parameters of one optimizer that are spread over processes.

    Parameters sharded over the same process groups are one part: their squares add up to one sum.

    Args:
        parameters: all of them, in any order; plain ones are the same in every process, unless
            there is a process group.
        process_group: of the processes among which whole parameters were divided.
    """

    def __init__(self, parameters: Sequence[Tensor], process_group: Any) -> None:
        self._process_group = process_group
        self._part_of: dict[Tensor, int] = {}
        known: dict[tuple[int, ...], Any] = {}
        parts: dict[tuple[tuple[int, ...], ...], int] = {}
        for p in parameters:
            # By their ranks: meshes that look alike may come with groups of their own.
            groups = {tuple(distributed.get_process_group_ranks(g)): g for g in _groups(p)}
            known |= {ranks: group for ranks, group in groups.items() if ranks not in known}
            self._part_of[p] = parts.setdefault(tuple(groups), len(parts))
        self.parts = max(len(parts), 1)
        # Each process group with the parts that are summed over it, in the order of the meshes'
        # dimensions, which all processes must follow alike.
        self._members = [
            (group, [part for over, part in parts.items() if ranks in over])
            for ranks, group in known.items()
        ]
        device = _communication_device(parameters, process_group)
        # Σδ² of each part over what this process holds, as the last step left it.
        self.sums = torch.zeros(self.parts, dtype=scalar_dtype(device), device=device)
        self.are_known = True
        self._modules: weakref.WeakSet[Any] | None = None

    def split(self, work: Work, parameters: Sequence[Tensor]) -> list[Work]:
        """A group's work, whose tensors are those of the parameters, in pieces of one part each."""
        if self.parts == 1:
            return [work]
        parts = [self._part_of[p] for p in parameters]
        pieces = []
        for part in sorted(set(parts)):
            chosen = [other == part for other in parts]
            pieces.append(
                replace(
                    work,
                    weights=list(compress(work.weights, chosen)),
                    gradients=list(compress(work.gradients, chosen)),
                    iterates=list(compress(work.iterates, chosen)),
                    offsets=work.offsets and list(compress(work.offsets, chosen)),
                    part=part,
                )
            )
        return pieces

    def meet(self, variables: int, flag: Tensor | None) -> Met:
        """What all processes know together; one all-reduce for each process group.

        Always the same numbers in the same order, whatever changed on one process alone: else they
        would wait for each other.
        """
        carried = [] if flag is None else [flag.reshape(1).to(self.sums)]
        values = torch.cat([self.sums, *carried])
        for group, parts in self._members:
            members = [*parts, *range(self.parts, len(values))]
            if len(members) == len(values):
                distributed.all_reduce(values, group=group)
            else:
                some = values[members]
                distributed.all_reduce(some, group=group)
                values[members] = some
        squared, flags = values[: self.parts].sum(), values[self.parts :].sum()
        if self._process_group is not None:
            # Other processes may have other parts: they share the whole of them alone.
            number = torch.full_like(squared, variables)
            values = torch.stack([squared, flags, number])
            distributed.all_reduce(values, group=self._process_group)
            squared, flags, number = values.unbind()
            variables = int(number)
        return Met(squared, variables, None if flag is None else flags)

    def reshard_models(self) -> None:
        """Have FSDP gather weights anew that were changed under its hands.

        After a forward pass that no backward pass follows, FSDP2 keeps the root module's gathered
        weights, and would go on with them although the shards now hold others. The optimizer does
        not know its model, so every FSDP module of the process lets its gathered weights go.
        """
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return
        if self._modules is None:  # once, since it looks at everything there is
            found = [o for o in gc.get_objects() if issubclass(type(o), fsdp.FSDPModule)]
            self._modules = weakref.WeakSet(found)
        for module in self._modules:
            module.reshard()


def shards_of(parameters: Sequence[Tensor], process_group: Any) -> Shards | None:
    """The shards of these parameters; None if every process has all of them whole."""
    for p in parameters:
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise RuntimeError(
                "the parameters belong to FullyShardedDataParallel (FSDP1), whose shards do not "
                "say what they are parts of, so that r cannot be known: use "
                "torch.distributed.fsdp.fully_shard (FSDP2; in Accelerate fsdp_version=2)"
            )
    spread = process_group is not None or any(map(is_dtensor, parameters))
    return Shards(parameters, process_group) if spread else None


class Carried:
    """A process group on its way into a copy of the optimizer, which shares it."""

    __slots__ = ("group",)

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "Carried":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer with a process group cannot be pickled, because the group means nothing "
            "elsewhere: save its state_dict()"
        )


def _groups(parameter: Any) -> tuple[Any, ...]:
    """The process groups that a parameter is sharded over."""
    if not is_dtensor(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )


def _communication_device(parameters: Sequence[Any], process_group: Any) -> torch.device:
    """Where the processes exchange scalars: with offloaded shards that is not where these are."""
    for p in parameters:
        if is_dtensor(p) and p.device_mesh.device_type != "cpu":
            return torch.device(p.device_mesh.device_type)
    if not parameters and distributed.get_backend(process_group) == "nccl":
        return torch.device("cuda")
    return parameters[0].device if parameters else torch.device("cpu")
