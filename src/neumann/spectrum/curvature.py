"""Matrices of second derivatives of a loss at the weights that a model holds.

    H = Σᵦ (nᵦ/N)·Hᵦ + λI        over batches b of nᵦ of N examples, λ the weight decay

What Hᵦ is, and how it is multiplied with a vector, is up to a subclass; here is what all of them
share: data, parameters, the state of the model, weight decay, and ranks. With a process group each
rank has its own batches; products are summed over the ranks, so that all of them get what one
process with all batches would.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from neumann.spectrum.batches import Piece, chunked, gather, moved
from neumann.spectrum.objective import Composed, Loss, as_objective
from neumann.spectrum.operators import About, Operator
from neumann.spectrum.parameters import Filter, Layout, select
from neumann.spectrum.state import (
    BatchNorm,
    batchnorm_layers,
    check_batchnorm,
    generators_kept,
    held,
    randomness,
    reseed,
)


class CurvatureOperator(Operator):
    """A matrix of second derivatives of the mean loss over a batch or a loader.

    Args:
        model: in the mode it is to be measured in, as far as BatchNorm is not concerned; dropout
            is active in training mode, with masks fixed by `seed`.
        loss: a function of outputs and targets that returns their mean loss, for batches that are
            pairs; or an :class:`Objective`.
        batch: the batch to measure on; or
        loader: an iterable of batches, read once and kept;
        batches: of the loader, only so many.
        chunk: examples that go through the model at a time, to bound the memory.
        batchnorm: "batch" for the statistics of each batch, as in training and in the paper, or
            "running" for the running statistics, as in evaluation.
        parameters: glob patterns or a function of the name; None for all that are trainable.
        weight_decay: λ of an L2 penalty λ‖w‖²/2 on these parameters, included in the matrix.
        seed: of dropout masks.
        count: a function that counts the examples of a batch; the length of its first tensor.
        process_group: sum over its ranks, each with its own data.
    """

    matrix = "curvature"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        batch: Any = None,
        loader: Iterable[Any] | None = None,
        batches: int | None = None,
        chunk: int | None = None,
        batchnorm: BatchNorm = "batch",
        parameters: Filter | None = None,
        weight_decay: float = 0.0,
        seed: int = 0,
        count: Callable[[Any], int] | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module  # whose hooks would reduce gradients, not products
        model = getattr(model, "_orig_mod", model)  # compiled code has no second derivatives
        if not (isfinite(weight_decay) and weight_decay >= 0):
            raise ValueError(f"weight_decay must be finite and at least 0, got {weight_decay!r}")
        check_batchnorm(model, batchnorm)
        self.model, self.objective = model, as_objective(loss)
        self.composed = Composed(model, self.objective)
        self.batchnorm, self.seed = batchnorm, seed
        self.weight_decay, self.process_group = weight_decay, process_group
        chosen = select(model, parameters)
        self.parameters = list(chosen.values())
        self.layout = Layout(chosen)
        with generators_kept(model):  # a DataLoader draws from them
            whole = gather(batch, loader, batches, count)
        layers = batchnorm_layers(model)
        self.pieces = whole
        self._unchecked: Piece | None = None  # a batch whose chunks are not compared with it yet
        if chunk is not None:
            if layers and batchnorm == "batch" and any(p.examples > chunk for p in whole):
                raise ValueError(
                    f'chunk={chunk} is wrong with batchnorm="batch": BatchNorm would normalise '
                    'each chunk by itself; pass chunk=None or batchnorm="running"'
                )
            self.pieces = chunked(whole, chunk)
            if len(self.pieces) > len(whole):
                self._unchecked = whole[0]
        self._open = False
        examples, first_piece, ranks = self._shared()
        self.examples, self._first_piece = examples, first_piece
        super().__init__(
            About(
                matrix=self.matrix,
                parameters=self.layout.total,
                dtype=self.layout.dtype,
                device=self.layout.device,
                examples=examples,
                batches=len(whole),
                batchnorm=batchnorm if layers else None,
                randomness=randomness(model, seed),
                weight_decay=weight_decay,
                names=self.layout.names,
                ranks=ranks,
            )
        )

    def _shared(self) -> tuple[int, int, int]:
        """Examples of all ranks, pieces on the ranks before this one, and the number of ranks."""
        examples = sum(piece.examples for piece in self.pieces)
        group = self.process_group
        if group is None:
            return examples, 0, 1
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        table = torch.zeros(ranks, 3, dtype=torch.int64, device=self.layout.device)
        mine = [examples, len(self.pieces), self.layout.total]
        table[rank] = torch.tensor(mine, device=self.layout.device)
        distributed.all_reduce(table, group=group)
        if (table[:, 2] != self.layout.total).any():
            raise ValueError(
                "the ranks of process_group must measure the same parameters, got "
                f"{table[:, 2].tolist()} numbers on its ranks"
            )
        return int(table[:, 0].sum()), int(table[:rank, 1].sum()), ranks

    @abstractmethod
    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        """Hᵦv for the batch or chunk of this index, as a tensor that may be written over."""

    def _environment(self) -> AbstractContextManager[object]:
        """What products need around them."""
        return nullcontext()

    def _release(self) -> None:
        """Let go of what the products of a session shared."""

    @contextmanager
    def session(self) -> Iterator[None]:
        if self._open:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(held(self.model, self.batchnorm))
            stack.enter_context(self._environment())
            stack.callback(self._close)
            self._open = True
            self.about = replace(self.about, randomness=randomness(self.model, self.seed))
            self._check_chunks()
            yield

    def _close(self) -> None:
        self._open = False
        self._release()

    def product(self, vector: Tensor) -> Tensor:
        if not self._open:
            with self.session():
                return self.product(vector)
        total: Tensor | None = None
        for index, piece in enumerate(self.pieces):
            part = self._piece_product(index, vector).mul_(piece.examples / self.examples)
            total = part if total is None else total.add_(part)
        assert total is not None
        if self.process_group is not None:
            distributed.all_reduce(total, group=self.process_group)
        if self.weight_decay:
            total.add_(vector, alpha=self.weight_decay)
        return total

    def agree(self, numbers: Tensor) -> Tensor:
        """The numbers of the first rank, so that all ranks stop at the same step."""
        if self.process_group is None:
            return numbers
        shared = numbers.to(self.device)
        first = distributed.get_global_rank(self.process_group, 0)
        distributed.broadcast(shared, src=first, group=self.process_group)
        return shared.to(numbers.device)

    def _data(self, index: int) -> Any:
        """A batch on the device, with the generators where they always are for it."""
        batch = moved(self.pieces[index].data, self.device)
        reseed(self.seed + self._first_piece + index, self.device)
        return batch

    def _loss(self, index: int) -> Tensor:
        loss: Tensor = self.composed(self._data(index))
        return loss

    def _check_chunks(self) -> None:
        """Refuse chunks whose losses do not make up the loss of the whole: examples are mixed."""
        if self._unchecked is None or self.about.randomness:
            return
        whole, pieces = self._unchecked, 0
        with torch.no_grad():
            expected = float(self.composed(moved(whole.data, self.device)))
            found, seen = 0.0, 0
            while seen < whole.examples:
                examples = self.pieces[pieces].examples
                found += float(self._loss(pieces)) * examples / whole.examples
                seen, pieces = seen + examples, pieces + 1
        room = 4 * torch.finfo(self.dtype).eps ** 0.5
        if abs(found - expected) > room * max(abs(found), abs(expected)):
            raise ValueError(
                f"chunk= changes the loss, from {expected:.6g} to {found:.6g}: a layer or the loss "
                "mixes the examples of a batch, or the loss is not their mean; pass chunk=None"
            )
        self._unchecked = None
