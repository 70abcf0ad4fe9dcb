"""Matrices of second derivatives of a loss at the weights that a model holds.

    H = Σᵦ (nᵦ/N)·Hᵦ + λI        over batches b of nᵦ of N examples, λ the weight decay

What Hᵦ is, and how it is multiplied with a vector, is up to a subclass; here is what all of them
share: data, parameters, the state of the model, weight decay, and ranks. With a process group each
rank has its own batches; products are summed over the ranks, so that all of them get what one
process with all batches would.

The first product of a session is looked at, on all ranks together: the loss must depend on the
weights and be finite, and chunks must make up their batch. Weights and data are the same for all
products of a session, so the others are not.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, distributed, nn

from neumann.spectrum.agreement import together
from neumann.spectrum.batches import Piece, chunked, gather, pairs_only
from neumann.spectrum.chunks import check_chunks
from neumann.spectrum.objective import Composed, Loss, Objective, as_objective
from neumann.spectrum.operators import About, Operator
from neumann.spectrum.parameters import Filter, Layout, select
from neumann.spectrum.passes import Passes
from neumann.spectrum.state import (
    BatchNorm,
    batchnorm_layers,
    check_batchnorm,
    dropout_off,
    generators_kept,
    held,
    randomness,
    refuse_inference_mode,
    unwrapped,
)


class CurvatureOperator(Operator):
    """A matrix of second derivatives of the mean loss over a batch or a loader.

    Args:
        model: in the mode it is to be measured in, as far as BatchNorm is not concerned; dropout
            is active in training mode, with masks fixed by `seed`.
        loss: a function of outputs and targets that returns their mean loss, for batches that are
            pairs; or an :class:`Objective`.
        batch: the batch to measure on; or
        loader: an iterable of batches, read once and kept; not a dataset, which gives examples;
        batches: of the loader, only so many.
        chunk: examples that go through the model at a time, to bound the memory; an error where
            that would be another function, see `chunks`.
        batchnorm: "batch" for the statistics of each batch, as in training and in the paper, or
            "running" for the running statistics, as in evaluation.
        parameters: glob patterns, each of which must match, or a function of the name; None for
            all that are trainable.
        weight_decay: λ of an L2 penalty λ‖w‖²/2 on these parameters, included in the matrix.
        seed: of dropout masks and other random numbers of a pass.
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
        refuse_inference_mode()
        model = unwrapped(model)
        self.model, self.objective = model, as_objective(loss)
        self.composed = Composed(model, self.objective)
        self.batchnorm, self.seed = batchnorm, seed
        self.weight_decay, self.process_group = weight_decay, process_group
        layers = batchnorm_layers(model)
        with together(process_group, next(model.parameters(), torch.empty(0)).device):
            if not (isfinite(weight_decay) and weight_decay >= 0):
                raise ValueError(
                    f"weight_decay must be finite and at least 0, got {weight_decay!r}"
                )
            check_batchnorm(model, batchnorm)
            chosen = select(model, parameters)
            self.parameters = list(chosen.values())
            self.layout = Layout(chosen)
            with generators_kept(model):  # a DataLoader draws from them
                whole = gather(batch, loader, batches, count)
            if not isinstance(loss, Objective):
                pairs_only(whole)
            self.pieces = whole if chunk is None else chunked(whole, chunk)
            long = next((p for p in whole if chunk is not None and p.examples > chunk), None)
            if layers and batchnorm == "batch" and long is not None:
                raise ValueError(
                    f'chunk={chunk} is wrong with batchnorm="batch": BatchNorm would normalise '
                    'each chunk by itself; pass chunk=None or batchnorm="running"'
                )
        self._cut = long  # a batch that is not compared with its chunks yet
        self._chunk = chunk
        self._passes = Passes(self.layout.device)
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
        refuse_inference_mode()
        with ExitStack() as stack:
            self._passes.begin(stack.enter_context(held(self.model, self.batchnorm)))
            stack.enter_context(self._environment())
            stack.callback(self._close)
            self._open = True
            self.about = replace(self.about, randomness=randomness(self.model, self.seed))
            yield

    def _close(self) -> None:
        self._open = False
        self._passes.end()
        self._release()

    def product(self, vector: Tensor) -> Tensor:
        if not self._open:
            with self.session():
                return self.product(vector)
        total = self._looked_at(lambda: self._local_product(vector))
        self._sum_ranks(total)
        if self.weight_decay:
            total.add_(vector, alpha=self.weight_decay)
        return total

    def _local_product(self, vector: Tensor) -> Tensor:
        """This rank's part of Hv, without weight decay."""
        total: Tensor | None = None
        for index, piece in enumerate(self.pieces):
            part = self._piece_product(index, vector).mul_(piece.examples / self.examples)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _sum_ranks(self, total: Tensor) -> None:
        if self.process_group is not None:
            distributed.all_reduce(total, group=self.process_group)

    def _looked_at(self, compute: Callable[[], Tensor]) -> Tensor:
        """What is computed; for the first time in a session with a look at how it went."""
        if not self._passes.watching:
            return compute()
        with together(self.process_group, self.device):
            self._check_chunks()
            answer = compute()
            self._passes.check(self.matrix)
        if self._passes.drew and self.about.randomness is None:
            drawn = f"random numbers fixed by seed {self.seed}"
            self.about = replace(self.about, randomness=drawn)
        self._passes.watching = False
        return answer

    def agree(self, numbers: Tensor) -> Tensor:
        """The numbers of the first rank, so that all ranks stop at the same step."""
        if self.process_group is None:
            return numbers
        shared = numbers.to(self.device)
        first = distributed.get_global_rank(self.process_group, 0)
        distributed.broadcast(shared, src=first, group=self.process_group)
        return shared.to(numbers.device)

    def _data(self, index: int) -> Any:
        """A batch on the device, at the start of a pass."""
        return self._passes.start(self.pieces[index], self.seed + self._first_piece + index)

    def _loss(self, index: int) -> Tensor:
        return self._passes.finish(self.composed(self._data(index)))

    def _gradient_of(self, loss: Tensor) -> Tensor:
        """The gradient of a loss that was just computed, as a flat vector."""
        return self.layout.join(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def _check_chunks(self) -> None:
        """Refuse chunks that are another function of the weights than their batch."""
        if self._cut is None or self._chunk is None:
            return

        def loss(piece: Piece) -> Tensor:
            found = self._passes.finish(self.composed(self._passes.start(piece, self.seed)))
            if self._passes.drew:
                raise ValueError(
                    "chunk= cannot be checked where the model draws random numbers outside of "
                    "dropout layers; pass chunk=None, or model.eval()"
                )
            return found

        def value(piece: Piece) -> Tensor:
            with torch.no_grad():
                return loss(piece).cpu().double()  # a sum of many

        def gradient(piece: Piece) -> Tensor:
            with torch.enable_grad():
                return self._gradient_of(loss(piece))

        with dropout_off(self.model):
            chunks = chunked([self._cut], self._chunk)
            check_chunks(self._cut, chunks, self.parameters, value, gradient)
        self._cut = None
