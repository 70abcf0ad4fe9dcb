"""Applies P to each matrix on one process, and carries gradients and directions there and back.

`ownership` says who owns which matrix. The collectives are asynchronous: all rounds of matrices
set out at once, each is handled when it has arrived, and goes back while the next one is handled.

A parameter takes part if P needs it whole and keeps no state of it. A matrix without a gradient on
this process counts as zeros here, so no process waits for one that has none. Experts that are
sharded one by one stay where they are: every process has whole matrices. What cannot be divided,
because P has state that must be the same on all processes or because the layout is neither sharded
nor replicated, is handled whole on all of them, as with distributed="replicated".

Gradients of shards that are offloaded to the host travel, and are handled, on the mesh's device.

If a process dies, the collectives raise on the others, after the timeout of the group at the
latest.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from neumann.optim.distributed import find_communication_device
from neumann.optim.dtensor import is_dtensor, local_part
from neumann.optim.precision import wide_dtype
from neumann.optim.preconditioners.memory import preconditioner_of, stages_of
from neumann.optim.preconditioners.ownership import Matrix, Plan, Round, Share, Transfer, make_plan
from neumann.optim.preconditioners.protocol import Preconditioner
from neumann.optim.tensors import Tensors
from neumann.validation import require

MODES = (None, "owner", "replicated")

# What P makes of whole gradients.
Apply = Callable[[Preconditioner, list[Tensor]], list[Tensor]]


class Line(NamedTuple):
    """The processes along one dimension of a mesh that this process belongs to."""

    group: Any
    order: tuple[int, ...]  # the coordinates of the group's ranks
    ranks: tuple[int, ...]  # global ranks by coordinate


@dataclass(frozen=True)
class Part:
    """The matrices of one mesh: parameters, the P of each, and the plan for them."""

    parameters: tuple[Tensor, ...]
    stages: tuple[Preconditioner, ...]
    matrices: tuple[Matrix, ...]
    plan: Plan
    lines: tuple[Line, ...]
    device: torch.device  # where matrices travel and P is applied


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
        if key != self._key:
            self._parameters = [p for group in chosen for p in group.parameters]
            self.parts = self._make_parts(chosen)
            self._key = key
        return self.parts

    def _make_parts(self, groups: Sequence[Tensors]) -> list[Part]:
        found: dict[Any, list[tuple[Tensor, Preconditioner, Matrix]]] = {}
        for group in groups:
            stage = stages_of(preconditioner_of(group.options))[-1]
            for p, active in zip(group.parameters, _find_active(group), strict=True):
                mesh, shards = _find_layout(p) if is_dtensor(p) else (self._replicas, (None,))
                if active and mesh is not None and shards and _is_divisible(stage, p):
                    matrix = describe_matrix(stage, p, shards)
                    found.setdefault(mesh, []).append((p, stage, matrix))
        return [
            _make_part(mesh, *zip(*entries, strict=True))
            for mesh, entries in found.items()
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
            f"distributed={mode!r} with process_group= says that the group's processes are "
            "replicas, but there are DTensors, which know theirs: leave distributed at None, or "
            "process_group out"
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


class Journey:
    """The gradients of one mesh's matrices on their way through P."""

    def __init__(self, part: Part, gradients: Mapping[Tensor, Tensor], apply: Apply) -> None:
        self._part, self._apply = part, apply
        self._given = [gradients.get(p) for p in part.parameters]
        self._blocks: dict[int, Tensor] = {}  # of each matrix: what this process has of it now
        self._rounds = [self._pass(each) for each in part.plan.rounds]

    def start(self) -> None:
        """Send the gradients on their way to their owners."""
        for each in self._rounds:
            next(each, None)

    def finish(self) -> dict[Tensor, Tensor]:
        """This process's part of the directions, of the parameters that have a gradient."""
        while self._rounds:
            # Rounds take turns, in the same order on all processes.
            self._rounds = [each for each in self._rounds if next(each, True) is None]
        # An empty shard has no direction, and does not travel between replicas.
        return {
            p: _lay_out_like(given, self._blocks[i]) if given.numel() else given
            for i, (p, given) in enumerate(zip(self._part.parameters, self._given, strict=True))
            if given is not None
        }

    def _pass(self, each: Round) -> Iterator[None]:
        """One round; yields whenever something is on its way, even if nothing of it is here."""
        for transfer in each.gathers:
            pending = self._send(each, transfer, self._collect(transfer))
            yield
            self._join(transfer, pending())
            del pending  # and its buffers with it
        self._apply_to_owned(each)
        for transfer in each.returns:
            pending = self._send(each, transfer, self._split(transfer))
            yield
            self._blocks.update(pending())
            del pending
        for share in each.shares:
            pending = self._spread(each, share)
            yield
            self._blocks.update(pending())
            del pending

    def _apply_to_owned(self, each: Round) -> None:
        by_stage: dict[int, list[int]] = {}
        for i in each.owned:
            by_stage.setdefault(id(self._part.stages[i]), []).append(i)
        for chosen in by_stage.values():
            wholes = [self._take(i, self._part.matrices[i].shape) for i in chosen]
            directions = self._apply(self._part.stages[chosen[0]], wholes)
            self._blocks.update(zip(chosen, directions, strict=True))

    def _take(self, i: int, shape: Sequence[int]) -> Tensor:
        """What this process has of a gradient: gathered, its own, or zeros if there is none."""
        block = self._blocks.pop(i, None)
        block = self._given[i] if block is None else block
        device = self._part.device
        if block is None:
            dtype = wide_dtype(self._part.parameters[i].dtype)
            return torch.zeros(shape, dtype=dtype, device=device)
        return block.to(device)

    def _sharded(self, i: int, dimension: int) -> int:
        """The dimension of a matrix that a mesh dimension cuts."""
        cut = self._part.matrices[i].shards[dimension]
        assert cut is not None
        return cut

    def _collect(self, transfer: Transfer) -> list[list[Tensor]]:
        """The gradients that leave, for each coordinate."""
        return [[self._take(b.matrix, b.shape) for b in to] for to in transfer.outgoing]

    def _join(self, transfer: Transfer, arrived: Iterable[tuple[int, Tensor]]) -> None:
        """Put the parts of each matrix together, which come in the order of coordinates."""
        parts: dict[int, list[Tensor]] = {}
        for i, part in arrived:
            parts.setdefault(i, []).append(part)
        for i, found in parts.items():
            self._blocks[i] = torch.cat(found, self._sharded(i, transfer.dimension))

    def _split(self, transfer: Transfer) -> list[list[Tensor]]:
        """The directions that go back, in pieces for each coordinate."""
        lengths: dict[int, list[int]] = {}
        for to in transfer.outgoing:
            for b in to:
                cut = self._sharded(b.matrix, transfer.dimension)
                lengths.setdefault(b.matrix, []).append(b.shape[cut])
        parts = {
            i: torch.split(self._blocks.pop(i), sizes, self._sharded(i, transfer.dimension))
            for i, sizes in lengths.items()
        }
        return [
            [parts[b.matrix][coordinate] for b in to]
            for coordinate, to in enumerate(transfer.outgoing)
        ]

    def _send(
        self, each: Round, transfer: Transfer, pieces: list[list[Tensor]]
    ) -> Callable[[], list[tuple[int, Tensor]]]:
        """Send pieces along a mesh dimension; the result waits for those that arrive."""
        if not any(transfer.outgoing) and not any(transfer.incoming):
            return list  # so it is for all processes of this line
        group, order, _ = self._part.lines[transfer.dimension]
        outgoing = [sum(b.numel for b in transfer.outgoing[j]) for j in order]
        incoming = [sum(b.numel for b in transfer.incoming[j]) for j in order]
        sent = self._concatenate(each, [piece for j in order for piece in pieces[j]])
        received = sent.new_empty(sum(incoming))
        work = distributed.all_to_all_single(
            received, sent, incoming, outgoing, group=group, async_op=True
        )

        def wait() -> list[tuple[int, Tensor]]:
            work.wait()
            chunks = dict(zip(order, torch.split(received, incoming), strict=True))
            found = []
            for j, blocks in enumerate(transfer.incoming):
                parts = torch.split(chunks[j], [b.numel for b in blocks])
                found += [(b.matrix, x.view(b.shape)) for b, x in zip(blocks, parts, strict=True)]
            return found

        return wait

    def _spread(self, each: Round, share: Share) -> Callable[[], list[tuple[int, Tensor]]]:
        """Share directions along a mesh dimension; the result waits for those that arrive."""
        group, _, ranks = self._part.lines[share.dimension]
        if len(ranks) == 1:
            return list
        me = distributed.get_rank()
        started = []
        for source, blocks in zip(ranks, share.sources, strict=True):
            if not blocks:  # so it is for all processes of this line
                continue
            if source == me:
                flat = self._concatenate(each, [self._blocks[b.matrix] for b in blocks])
            else:
                flat = self._make_room(each, sum(b.numel for b in blocks))
            work = distributed.broadcast(flat, source, group=group, async_op=True)
            started.append((work, flat, () if source == me else blocks))

        def wait() -> list[tuple[int, Tensor]]:
            found = []
            for work, flat, blocks in started:
                work.wait()
                parts = torch.split(flat, [b.numel for b in blocks]) if blocks else ()
                found += [(b.matrix, x.view(b.shape)) for b, x in zip(blocks, parts, strict=True)]
            return found

        return wait

    def _concatenate(self, each: Round, pieces: Sequence[Tensor]) -> Tensor:
        """One flat tensor, in the dtype of the round."""
        if not pieces:
            return self._make_room(each, 0)
        dtype = wide_dtype(self._part.parameters[each.matrices[0]].dtype)
        joined: Tensor = torch.cat([piece.reshape(-1).to(dtype) for piece in pieces])
        return joined

    def _make_room(self, each: Round, count: int) -> Tensor:
        """Memory for so many elements, in the dtype and on the device of the round."""
        dtype = wide_dtype(self._part.parameters[each.matrices[0]].dtype)
        return torch.empty(count, dtype=dtype, device=self._part.device)


# ------------------------------------------------------------------ what takes part


def _find_active(group: Tensors) -> list[bool]:
    """Whether each parameter is trained; the same on all processes, gradient or not."""
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
    """The mesh of a DTensor and the tensor dimension that each of its dimensions cuts.

    There are none of these for a layout that is not handled.
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


def _make_part(
    mesh: Any,
    parameters: tuple[Tensor, ...],
    stages: tuple[Preconditioner, ...],
    matrices: tuple[Matrix, ...],
) -> Part:
    if hasattr(mesh, "get_coordinate"):
        place = list(mesh.get_coordinate())
        lines = [_find_line(mesh, d, place) for d in range(mesh.ndim)]
    else:
        place = [distributed.get_rank(mesh)]
        ranks = tuple(distributed.get_process_group_ranks(mesh))
        lines = [Line(mesh, tuple(range(len(ranks))), ranks)]
    plan = make_plan(matrices, [len(line.ranks) for line in lines], place)
    device = find_communication_device(parameters, mesh)
    for line in lines:
        _require_same(matrices, line.group, device)
    return Part(parameters, stages, matrices, plan, tuple(lines), device)


def _require_same(matrices: Sequence[Matrix], group: Any, device: torch.device) -> None:
    """Raise on all processes unless they have the same matrices: they would wait for each other."""
    digest = zlib.crc32(repr(matrices).encode())
    ends = torch.tensor([digest, -digest], device=device)
    distributed.all_reduce(ends, distributed.ReduceOp.MAX, group=group)
    largest, smallest = ends.tolist()
    if largest != -smallest:
        raise RuntimeError(
            "the processes have different parameters, in number, shape or order, so their matrices "
            "cannot be divided: with ZeRO or pipeline stages leave distributed at None"
        )


def _find_line(mesh: Any, dimension: int, place: Sequence[int]) -> Line:
    """The processes that differ from this one in one coordinate; their group may be sorted."""
    index = tuple(slice(None) if d == dimension else c for d, c in enumerate(place))
    ranks = tuple(mesh.mesh[index].tolist())
    group = mesh.get_group(dimension)
    order = tuple(map(ranks.index, distributed.get_process_group_ranks(group)))
    return Line(group, order, ranks)


def _lay_out_like(given: Tensor, direction: Tensor) -> Tensor:
    """The direction with the dtype, device and memory format of the gradient."""
    same = direction.dtype is given.dtype and direction.device == given.device
    if same and direction.stride() == given.stride():
        return direction
    result: Tensor = torch.empty_like(given).copy_(direction)
    return result
