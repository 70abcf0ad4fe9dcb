"""Which process applies P to which matrix, and what has to travel for that.

Everything here is a pure function of the matrices, the mesh and a process's place in it, so that
all processes agree without asking each other. `journey` carries it out.

A mesh has one or more dimensions; a process has a coordinate in each. A matrix is sharded along
some of them and replicated along the others, and one process owns it:

    gather   along each sharded dimension, from the last to the first, its parts go to the owner
    return   along the same dimensions in reverse, the parts of P's direction go back
    share    along each replicated dimension, the processes that have the direction send it on

With FSDP2 there is one sharded dimension, with HSDP also a replicated one, and the replicas of DDP
are a mesh of one replicated dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

ROUND_BYTES = 2**25  # matrices of several costs travel together up to this size
BALANCE = 1.05  # work of the busiest process that keeping equal matrices together may cost


@dataclass(frozen=True)
class Matrix:
    """A parameter that holds a matrix, or several, and is divided as a whole."""

    shape: tuple[int, ...]
    shards: tuple[int | None, ...]  # the tensor dimension each mesh dimension cuts; None: none
    operations: int  # of P
    itemsize: int  # bytes of an element in P's arithmetic
    kind: str = ""  # matrices that differ in it, as in device or dtype, never travel together


@dataclass(frozen=True)
class Block:
    """A part of a matrix on its way."""

    matrix: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Transfer:
    """Blocks that move along one mesh dimension, for each coordinate in it; its own too."""

    dimension: int
    outgoing: tuple[tuple[Block, ...], ...]
    incoming: tuple[tuple[Block, ...], ...]

    def reverse(self) -> "Transfer":
        """The way back of the same blocks."""
        return Transfer(self.dimension, self.incoming, self.outgoing)


@dataclass(frozen=True)
class Share:
    """Blocks that each coordinate of one mesh dimension sends to all the others."""

    dimension: int
    sources: tuple[tuple[Block, ...], ...]


@dataclass(frozen=True)
class Round:
    """Matrices that travel together; the hops are the same list on all processes."""

    matrices: tuple[int, ...]
    owned: tuple[int, ...]  # by this process
    gathers: tuple[Transfer, ...]
    returns: tuple[Transfer, ...]
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Plan:
    """What one process does for the matrices of a mesh in every step.

    A block that is shared counts once for each process that receives it, whatever way the
    backend's broadcast takes.
    """

    rounds: tuple[Round, ...]
    owned: tuple[int, ...]  # matrices that this process applies P to
    operations: int  # of these
    bytes_sent: int  # to other processes, in a step


def make_plan(
    matrices: Sequence[Matrix],
    sizes: Sequence[int],
    place: Sequence[int],
    round_bytes: int | None = None,
) -> Plan:
    """The plan of the process at this place of a mesh with these sizes."""
    order = sorted(range(len(matrices)), key=lambda i: (*_cost_class(matrices[i]), i))
    costs = [matrices[i].operations for i in order]
    owners = dict(zip(order, divide(costs, math.prod(sizes)), strict=True))
    limit = ROUND_BYTES if round_bytes is None else round_bytes
    rounds = tuple(
        _plan_round(chosen, matrices, owners, sizes, place)
        for chosen in _make_rounds(order, matrices, limit)
    )
    owned = tuple(i for each in rounds for i in each.owned)
    operations = sum(matrices[i].operations for i in owned)
    return Plan(rounds, owned, operations, _count_bytes(rounds, matrices, place))


# ------------------------------------------------------------------ division


def divide(costs: Sequence[int], processes: int) -> list[int]:
    """The owner of each matrix. Equal costs should be neighbors, the largest first.

    Neighbors go to the same process, so that batches of equal matrices stay batches, unless that
    costs the busiest process more than 5 %. If there are fewer matrices than processes, each has
    a process of its own.
    """
    if len(costs) <= processes:
        return [i * processes // len(costs) for i in range(len(costs))]
    together, apart = _cut_in_runs(costs, processes), _deal_out(costs, processes)
    limit = BALANCE * max(_loads(apart, costs, processes))
    return together if max(_loads(together, costs, processes)) <= limit else apart


def _cut_in_runs(costs: Sequence[int], processes: int) -> list[int]:
    """Consecutive matrices for each process, with the smallest largest sum."""
    low, high = max(max(costs), -(-sum(costs) // processes)), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _fill(costs, middle)[-1] < processes:
            high = middle
        else:
            low = middle + 1
    return _fill(costs, low)


def _fill(costs: Sequence[int], limit: int) -> list[int]:
    """The owners if each process takes matrices up to the limit before the next one begins.

    No cost is above the limit.
    """
    owners, load, owner = [], 0, 0
    for cost in costs:
        if load + cost > limit:
            owner, load = owner + 1, 0
        load += cost
        owners.append(owner)
    return owners


def _deal_out(costs: Sequence[int], processes: int) -> list[int]:
    """Each matrix, the largest first, for the process with the least work so far."""
    loads, owners = [0] * processes, []
    for cost in costs:
        owner = loads.index(min(loads))
        loads[owner] += cost
        owners.append(owner)
    return owners


def _loads(owners: Sequence[int], costs: Sequence[int], processes: int) -> list[int]:
    loads = [0] * processes
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    return loads


# ------------------------------------------------------------------ rounds


def _cost_class(matrix: Matrix) -> tuple[str, int, int]:
    """Matrices that share it may form a batch: those of equal shape, transposed or not."""
    return matrix.kind, -matrix.operations, math.prod(matrix.shape)


def _make_rounds(
    order: Sequence[int], matrices: Sequence[Matrix], limit: int
) -> list[tuple[int, ...]]:
    rounds: list[list[int]] = []
    size, kind = limit, ""
    for _, members in groupby(order, lambda i: _cost_class(matrices[i])):
        chosen = list(members)
        first = matrices[chosen[0]]
        if size >= limit or first.kind != kind:
            rounds.append([])
            size, kind = 0, first.kind
        rounds[-1] += chosen
        size += len(chosen) * math.prod(first.shape) * first.itemsize
    return [tuple(chosen) for chosen in rounds]


def _plan_round(
    chosen: tuple[int, ...],
    matrices: Sequence[Matrix],
    owners: dict[int, int],
    sizes: Sequence[int],
    place: Sequence[int],
) -> Round:
    homes = {i: find_place(owners[i], sizes) for i in chosen}
    owned = tuple(i for i in chosen if homes[i] == tuple(place))
    dimensions = range(len(sizes))
    sharded = [d for d in dimensions if any(matrices[i].shards[d] is not None for i in chosen)]
    replicated = [d for d in dimensions if any(matrices[i].shards[d] is None for i in chosen)]
    gathers = {d: _plan_gather(d, matrices, homes, sizes, place) for d in sharded}
    return Round(
        chosen,
        owned,
        tuple(gathers[d] for d in reversed(sharded)),
        tuple(gathers[d].reverse() for d in sharded),
        tuple(_plan_share(d, matrices, homes, sizes, place) for d in replicated),
    )


def _plan_gather(
    dimension: int,
    matrices: Sequence[Matrix],
    homes: dict[int, tuple[int, ...]],
    sizes: Sequence[int],
    place: Sequence[int],
) -> Transfer:
    """Blocks on their way to the owner's coordinate in one sharded dimension."""
    outgoing: list[list[Block]] = [[] for _ in range(sizes[dimension])]
    incoming: list[list[Block]] = [[] for _ in range(sizes[dimension])]
    for i, home in homes.items():
        shards = matrices[i].shards
        # It must have arrived at the owner's coordinate in every dimension but these.
        open_ones = [d for d in range(dimension + 1) if shards[d] is not None]
        if shards[dimension] is None or not _agree(home, place, open_ones):
            continue
        outgoing[home[dimension]].append(Block(i, _cut(matrices[i], sizes, place, open_ones)))
        if home[dimension] == place[dimension]:
            for source, blocks in enumerate(incoming):
                there = [*place[:dimension], source, *place[dimension + 1 :]]
                blocks.append(Block(i, _cut(matrices[i], sizes, there, open_ones)))
    return Transfer(dimension, tuple(map(tuple, outgoing)), tuple(map(tuple, incoming)))


def _plan_share(
    dimension: int,
    matrices: Sequence[Matrix],
    homes: dict[int, tuple[int, ...]],
    sizes: Sequence[int],
    place: Sequence[int],
) -> Share:
    """Blocks that go from the owner's coordinate in one replicated dimension to all others."""
    sources: list[list[Block]] = [[] for _ in range(sizes[dimension])]
    for i, home in homes.items():
        shards = matrices[i].shards
        everywhere = range(len(sizes))
        sharded = [d for d in everywhere if shards[d] is not None]
        # The dimensions before this one have been shared already.
        open_ones = [d for d in everywhere if d <= dimension or shards[d] is not None]
        if shards[dimension] is None and _agree(home, place, open_ones):
            block = Block(i, _cut(matrices[i], sizes, place, sharded))
            if block.numel:
                sources[home[dimension]].append(block)
    return Share(dimension, tuple(map(tuple, sources)))


def find_place(process: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a process in a mesh, the last one counting fastest."""
    place = []
    for size in reversed(sizes):
        process, coordinate = divmod(process, size)
        place.append(coordinate)
    return tuple(reversed(place))


def _agree(home: Sequence[int], place: Sequence[int], apart: Sequence[int]) -> bool:
    """Whether two places agree in all dimensions but some."""
    return all(home[d] == place[d] for d in range(len(place)) if d not in apart)


def _cut(
    matrix: Matrix, sizes: Sequence[int], place: Sequence[int], among: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the part at a place, cut along some mesh dimensions, as DTensor cuts it."""
    shape = list(matrix.shape)
    for d in among:
        dimension = matrix.shards[d]
        assert dimension is not None
        shape[dimension] = chunk_size(shape[dimension], sizes[d], place[d])
    return tuple(shape)


def chunk_size(length: int, count: int, index: int) -> int:
    """The length of one of `count` chunks, as torch.chunk makes them; the last may be empty."""
    step = -(-length // count)
    return max(0, min(step, length - step * index))


def _count_bytes(rounds: Sequence[Round], matrices: Sequence[Matrix], place: Sequence[int]) -> int:
    total = 0
    for each in rounds:
        for transfer in (*each.gathers, *each.returns):
            for coordinate, blocks in enumerate(transfer.outgoing):
                if coordinate != place[transfer.dimension]:
                    total += sum(b.numel * matrices[b.matrix].itemsize for b in blocks)
        for share in each.shares:
            own = share.sources[place[share.dimension]]
            others = len(share.sources) - 1
            total += others * sum(b.numel * matrices[b.matrix].itemsize for b in own)
    return total
