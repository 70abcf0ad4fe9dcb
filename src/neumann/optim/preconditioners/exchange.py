"""Which parameters are divided among processes, on which meshes, by which plan.

A parameter takes part if P needs it whole and keeps no state of it. Experts that are sharded one by
one stay where they are: every process has whole matrices. What cannot be divided, because P has
state that must be the same on all processes or because the layout is neither sharded nor
replicated, is handled whole on all of them, as with distributed="replicated".

Each step begins with an all-reduce of two numbers, which says whether all processes have the same
matrices and have frozen the same ones. Otherwise they would wait for each other.

`ownership` makes the plan, `journey` carries it out.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from neumann.optim.distributed import find_communication_device
from neumann.optim.dtensor import is_dtensor, local_part
from neumann.optim.precision import wide_dtype
from neumann.optim.preconditioners.memory import preconditioner_of, stages_of
from neumann.optim.preconditioners.ownership import Matrix, Plan, make_plan
from neumann.optim.preconditioners.protocol import Preconditioner
from neumann.optim.tensors import Tensors
from neumann.validation import require

MODES = (None, "owner", "replicated")


class Line(NamedTuple):
    """The processes along one dimension of a mesh that this process belongs to."""

    group: Any
    order: tuple[int, ...]  # the coordinates of the group's ranks
    ranks: tuple[int, ...]  # global ranks by coordinate


class Candidate(NamedTuple):
    """A parameter that can be divided."""

    parameter: Tensor
    stage: Preconditioner
    matrix: Matrix
    is_active: bool  # it is trained; frozen ones stay where they are


@dataclass(frozen=True)
class Part:
    """The matrices of one mesh that are trained: parameters, P of each, and the plan for them."""

    parameters: tuple[Tensor, ...]
    stages: tuple[Preconditioner, ...]
    matrices: tuple[Matrix, ...]
    plan: Plan
    lines: tuple[Line, ...]
    device: torch.device  # where matrices travel and P is applied
    digest: Tensor  # d and −d, where d stands for the matrices and for which are frozen


class Exchange:
    """How the matrices of one optimizer are divided among processes.

    Args:
        replicas: the process group whose processes all have the plain parameters whole; None if
            only DTensors, which know their mesh, are divided.
    """

    def __init__(self, replicas: Any = None) -> None:
        self._replicas = replicas
        self._key: Any = None
        self._parameters: list[Tensor] = []  # keeps the identities in the key valid
        self.parts: list[Part] = []

    def divide(self, groups: Sequence[Tensors]) -> list[Part]:
        """The matrices of a step by mesh; computed again only if parameters or P have changed."""
        chosen = [group for group in groups if group.options["precondition"] is not None]
        key = [
            (group.options["precondition"], [*map(id, group.parameters)], _find_active(group))
            for group in chosen
        ]
        is_new = key != self._key
        parts = self._make_parts(chosen) if is_new else self.parts
        for part in parts:
            _require_agreement(part, is_new)
        if is_new:
            self._parameters = [p for group in chosen for p in group.parameters]
            self.parts, self._key = parts, key
        return self.parts

    def _make_parts(self, groups: Sequence[Tensors]) -> list[Part]:
        found: dict[Any, list[Candidate]] = {}
        for group in groups:
            stage = stages_of(preconditioner_of(group.options))[-1]
            active = set(compress(group.parameters, _find_active(group)))
            all_of_them: Any = group.options  # a parameter group; `group` leaves frozen ones out
            for p in all_of_them["params"]:
                mesh, shards = _find_layout(p) if is_dtensor(p) else (self._replicas, (None,))
                if mesh is not None and shards and _is_divisible(stage, p):
                    matrix = describe_matrix(stage, p, shards)
                    found.setdefault(mesh, []).append(Candidate(p, stage, matrix, p in active))
        return [
            _make_part(mesh, candidates)
            for mesh, candidates in found.items()
            if mesh.size() > 1  # a DeviceMesh and a process group both have it
        ]


def find_exchange(
    parameters: Sequence[Tensor], mode: str | None, process_group: Any
) -> Exchange | None:
    """What divides matrices, if there are processes to divide them among."""
    require(mode in MODES, "distributed", mode, "None, 'owner' or 'replicated'")
    sharded = any(map(is_dtensor, parameters))
    if mode is not None and process_group is not None and sharded:
        raise ValueError(
            f"distributed={mode!r} with process_group= is for replicas, but some parameters are "
            "DTensors, which name their own processes: leave out distributed or process_group"
        )
    if mode == "replicated":
        return None
    if mode is None or process_group is None:
        if mode == "owner" and not sharded and _count_processes() > 1:
            raise ValueError(
                "distributed='owner' with parameters that are not DTensors needs process_group=, "
                "the processes that have copies of them, such as torch.distributed.group.WORLD"
            )
        return Exchange() if sharded else None
    return Exchange(process_group) if distributed.get_world_size(process_group) > 1 else None


def holds_whole_matrices(stage: Preconditioner, p: Any) -> bool:
    """Whether a DTensor is cut between its matrices, so that each process has as many, whole."""
    is_separable = getattr(stage, "is_separable", None)
    if is_separable is None or not is_separable(p):
        return False
    mesh, shards = _find_layout(p)
    return set(shards) == {0} and len(p) % int(mesh.size()) == 0


def describe_matrix(stage: Preconditioner, p: Tensor, shards: tuple[int | None, ...]) -> Matrix:
    """A parameter as `ownership` sees it."""
    count = getattr(stage, "count_operations", None)
    dtype = wide_dtype(p.dtype)
    return Matrix(
        tuple(p.shape),
        shards,
        int(p.numel() if count is None else count(p)),
        dtype.itemsize,
        f"{local_part(p).device.type} {dtype}",
    )


# ------------------------------------------------------------------ what takes part


def _find_active(group: Tensors) -> list[bool]:
    """Whether each parameter is trained; all processes must agree on it, gradient or not."""
    return [
        p.requires_grad or g is not None
        for p, g in zip(group.parameters, group.gradients, strict=True)
    ]


def _is_divisible(stage: Preconditioner, p: Tensor) -> bool:
    """Whether P needs the parameter whole, and remembers nothing of it."""
    if p.is_complex() or stage.elementwise(p) or (is_dtensor(p) and holds_whole_matrices(stage, p)):
        return False
    return not stage.create(local_part(p).new_empty(1).expand(p.shape))


def _count_processes() -> int:
    initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialized else 1


def _find_layout(p: Any) -> tuple[Any, tuple[int | None, ...]]:
    """The mesh of a DTensor, and for each mesh dimension the tensor dimension that it cuts.

    The second is empty if this process is not in the mesh, or for a placement that is neither a
    plain shard nor a replica.
    """
    from torch.distributed.tensor import Shard

    if p.device_mesh.get_coordinate() is None:
        return p.device_mesh, ()  # this process is not part of the mesh
    shards: list[int | None] = []
    for placement in p.placements:
        if placement.is_replicate():
            shards.append(None)
        elif type(placement) is Shard:  # not a strided one, nor a sum that is pending
            shards.append(placement.dim % p.ndim)
        else:
            return p.device_mesh, ()
    return p.device_mesh, tuple(shards)


# ------------------------------------------------------------------ meshes


def _make_part(mesh: Any, candidates: Sequence[Candidate]) -> Part:
    if hasattr(mesh, "get_coordinate"):
        place = list(mesh.get_coordinate())
        lines = [_find_line(mesh, d, place) for d in range(mesh.ndim)]
    else:
        place = [distributed.get_rank(mesh)]
        ranks = tuple(distributed.get_process_group_ranks(mesh))
        lines = [Line(mesh, tuple(range(len(ranks))), ranks)]
    active = [c for c in candidates if c.is_active]
    matrices = tuple(c.matrix for c in active)
    plan = make_plan(matrices, [len(line.ranks) for line in lines], place)
    device = find_communication_device([c.parameter for c in candidates], mesh)
    number = zlib.crc32(repr([(c.matrix, c.is_active) for c in candidates]).encode())
    return Part(
        tuple(c.parameter for c in active),
        tuple(c.stage for c in active),
        matrices,
        plan,
        tuple(lines),
        device,
        torch.tensor([number, -number], device=device),
    )


def _require_agreement(part: Part, is_new: bool) -> None:
    """Raise on all processes unless they have the same matrices and have frozen the same ones.

    A process cannot know whether something has changed on another, so all meet here in every step.
    To read the answer, a process waits for the device: on a GPU only those do that have changed.
    """
    ends = part.digest.clone()
    for line in part.lines:
        distributed.all_reduce(ends, distributed.ReduceOp.MAX, group=line.group)
    if not is_new and part.device.type != "cpu":
        return
    largest, smallest = ends.tolist()
    if largest != -smallest:
        raise RuntimeError(
            "the processes have different parameters, or have frozen different ones, so their "
            "matrices cannot be divided: with ZeRO or pipeline stages leave distributed at None"
        )


def _find_line(mesh: Any, dimension: int, place: Sequence[int]) -> Line:
    """The processes that differ from this one in one coordinate; their group may be sorted."""
    index = tuple(slice(None) if d == dimension else c for d, c in enumerate(place))
    ranks = tuple(mesh.mesh[index].tolist())
    group = mesh.get_group(dimension)
    order = tuple(map(ranks.index, distributed.get_process_group_ranks(group)))
    return Line(group, order, ranks)
