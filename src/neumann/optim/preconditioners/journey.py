"""Carries gradients to the owners of their matrices, and the directions back.

`exchange` says which matrices take part, `ownership` who owns which. The collectives are
asynchronous: all rounds of matrices set out at once, each is handled when it has arrived, and goes
back while the next one is handled.

A matrix without a gradient on this process counts as zeros here, so no process waits for one that
has none. Gradients of shards that are offloaded to the host travel, and are handled, on the mesh's
device. If a process dies, the collectives raise on the others, after the timeout of the group at
the latest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, distributed

from neumann.optim.precision import wide_dtype
from neumann.optim.preconditioners.exchange import Part
from neumann.optim.preconditioners.ownership import Round, Share, Transfer
from neumann.optim.preconditioners.protocol import Preconditioner

# What P makes of whole gradients.
Apply = Callable[[Preconditioner, list[Tensor]], list[Tensor]]


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
        """Memory for `count` elements, in the dtype and on the device of the round."""
        dtype = wide_dtype(self._part.parameters[each.matrices[0]].dtype)
        return torch.empty(count, dtype=dtype, device=self._part.device)


def _lay_out_like(given: Tensor, direction: Tensor) -> Tensor:
    """The direction with the dtype, device and memory format of the gradient."""
    same = direction.dtype is given.dtype and direction.device == given.device
    if same and direction.stride() == given.stride():
        return direction
    result: Tensor = torch.empty_like(given).copy_(direction)
    return result
