"""Matrices of second derivatives of a loss, at the current weights of a model.

    H = Σᵦ (nᵦ/N)·Hᵦ + λI        over batches b of nᵦ out of N examples; λ is the weight decay

Subclasses multiply Hᵦ by a vector. With a process group each rank has its own batches, and products
are summed over the ranks. The first product of a session is checked, on all ranks together: the
loss must be finite and depend on the weights, and chunks must add up to their batch. Weights and
data are the same for all products of a session, so the others need no check.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn

from neumann.spectrum.operators import float32_error, model_state
from neumann.spectrum.operators.batches import (
    Piece,
    check_chunks,
    check_pairs,
    collect_batches,
    convert_to_float64,
    move_to,
    split_into_chunks,
)
from neumann.spectrum.operators.objective import Loss, LossModule, Objective, as_objective
from neumann.spectrum.operators.symmetric import About, NonFiniteProduct, Operator
from neumann.spectrum.operators.vectors import Filter, Layout, random_unit, select_parameters
from neumann.validation import require


class CurvatureOperator(Operator):
    """A matrix of second derivatives of the mean loss over a batch or a loader.

    Args:
        model: measured in its current mode, except for BatchNorm. In training mode dropout is
            active, with masks fixed by `seed`.
        loss: a function of outputs and targets that returns their mean loss, for batches that are
            pairs; or an :class:`Objective`.
        batch: the batch to measure on. Pass this or `loader`.
        loader: an iterable of batches, read once and kept; not a dataset, which yields examples.
        batches: how many batches of the loader to use, from the first on; None uses all.
        chunk: how many examples go through the model at a time, to limit memory. Raises if that
            changes the loss; see `batches`.
        batchnorm: "batch" for the statistics of each batch, as in training and in the paper, or
            "running" for the running statistics, as in evaluation.
        parameters: glob patterns, each of which must match, or a function of the name; by default
            all trainable parameters.
        weight_decay: λ of an L2 penalty λ‖w‖²/2 on these parameters, included in the matrix.
        seed: of dropout masks and other random numbers of a pass.
        count: a function that counts the examples of a batch; by default the length of its first
            tensor.
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
        batchnorm: model_state.BatchNorm = "batch",
        parameters: Filter | None = None,
        weight_decay: float = 0.0,
        seed: int = 0,
        count: Callable[[Any], int] | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        model_state.refuse_inference_mode()
        model = model_state.unwrap(model)
        self.model, self.objective = model, as_objective(loss)
        self.loss_module = LossModule(model, self.objective)
        self.batchnorm, self.seed = batchnorm, seed
        self.weight_decay, self.process_group = weight_decay, process_group
        layers = model_state.batchnorm_layers(model)
        device = next(model.parameters(), torch.empty(0)).device
        with raise_on_all_ranks(process_group, device):
            good = isfinite(weight_decay) and weight_decay >= 0
            require(good, "weight_decay", weight_decay, "finite and at least 0")
            model_state.check_batchnorm(model, batchnorm)
            selected = select_parameters(model, parameters)
            self.parameters = list(selected.values())
            self.layout = Layout(selected)
            with model_state.preserve_generators(model):  # a DataLoader draws from them
                whole = collect_batches(batch, loader, batches, count)
            if not isinstance(loss, Objective):
                check_pairs(whole)
            self.pieces = whole if chunk is None else split_into_chunks(whole, chunk)
            split = next((p for p in whole if chunk is not None and p.examples > chunk), None)
            if layers and batchnorm == "batch" and split is not None:
                raise ValueError(
                    f'chunk={chunk} conflicts with batchnorm="batch": BatchNorm would normalize '
                    'each chunk by itself; pass chunk=None or batchnorm="running"'
                )
        self._unchecked_batch = split  # not compared with its chunks yet
        self._chunk = chunk
        self._passes: model_state.Passes  # exists while the session is open
        self._open = False
        self._session_error: float | None = None  # of a product; None: not measured yet
        self.examples, self._first_piece, ranks = self._count_over_ranks()
        super().__init__(
            About(
                matrix=self.matrix,
                parameters=self.layout.total,
                dtype=self.layout.dtype,
                device=self.layout.device,
                examples=self.examples,
                batches=len(whole),
                batchnorm=batchnorm if layers else None,
                randomness=model_state.describe_randomness(model, seed),
                weight_decay=weight_decay,
                names=self.layout.names,
                ranks=ranks,
            )
        )

    def _count_over_ranks(self) -> tuple[int, int, int]:
        """Return the examples of all ranks, the pieces of the ranks before this one, the ranks."""
        examples = sum(piece.examples for piece in self.pieces)
        group = self.process_group
        if group is None:
            return examples, 0, 1
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        table = torch.zeros(ranks, 3, dtype=torch.int64, device=self.layout.device)
        mine = [examples, len(self.pieces), self.layout.total]
        table[rank] = torch.tensor(mine, device=self.layout.device)
        distributed.all_reduce(table, group=group)
        totals = table[:, 2].tolist()
        require(len(set(totals)) == 1, "the size of the matrix", totals, "the same on all ranks")
        return int(table[:, 0].sum()), int(table[:rank, 1].sum()), ranks

    @abstractmethod
    def _local_product(self, vector: Tensor) -> Tensor:
        """Return this rank's part of Hv, without weight decay, as a tensor we may write to."""

    def _environment(self) -> AbstractContextManager[object]:
        """Return the context that products run in."""
        return nullcontext()

    def _release(self) -> None:
        """Drop what the products of a session shared."""

    @contextmanager
    def session(self) -> Iterator[None]:
        if self._open:
            yield
            return
        model_state.refuse_inference_mode()
        with ExitStack() as stack:
            buffers = stack.enter_context(model_state.preserve_model(self.model, self.batchnorm))
            self._passes = model_state.Passes(buffers, self.device)
            stack.enter_context(self._environment())
            stack.callback(self._close)
            self._open = True
            randomness = model_state.describe_randomness(self.model, self.seed)
            self.about = replace(self.about, randomness=randomness)
            yield

    def _close(self) -> None:
        self._open = False
        self._session_error = None
        del self._passes
        self._release()

    def product(self, vector: Tensor) -> Tensor:
        if not self._open:
            with self.session():
                return self.product(vector)
        total = self._check_first(lambda: self._local_product(vector))
        self._sum_over_ranks(total)
        if self.weight_decay:
            total.add_(vector, alpha=self.weight_decay)
        return total

    def _sum_over_ranks(self, total: Tensor) -> None:
        if self.process_group is not None:
            distributed.all_reduce(total, group=self.process_group)

    def _check_first(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return compute(); the first time in a session, also check the loss behind it."""
        if not self._passes.checking:
            return compute()
        with raise_on_all_ranks(self.process_group, self.device):
            self._check_chunks()
            answer = compute()
            self._passes.check_finite(self.matrix)
        if self._passes.used_randomness and self.about.randomness is None:
            randomness = f"random numbers fixed by seed {self.seed}"
            self.about = replace(self.about, randomness=randomness)
        self._passes.checking = False
        return answer

    def product_error(self) -> float:
        with self.session():
            if self._session_error is None:
                self._session_error = self._measure_product_error()
            return self._session_error

    def _measure_product_error(self) -> float:
        return self._measure_float32_error()

    def _measure_float32_error(self) -> float:
        """Return the error of float32 products, or 0 unless a layer subtracts a large mean.

        If the products cannot be compared with float64, warn instead.
        """
        if self.dtype != torch.float32:
            return 0.0
        layer, ratio = self._find_largest_mean()
        if not ratio >= float32_error.LARGE_RATIO:
            return 0.0
        start = random_unit(self.size, 0, self.dtype, self.device)
        reason = "the data are spread over processes"
        if self.process_group is None:
            self.product(start)  # raises what is wrong with the loss, and notices random numbers
            reason = "the model draws random numbers, which differ in float64"
            if self.about.randomness is None:
                try:
                    twin = self._copy_in_float64()
                    with twin.session():
                        found = float32_error.difference_norm(self.product, twin.product, start)
                    return float32_error.ERROR_PER_DIFFERENCE * found
                # Whatever a model does in float64, it must not end the measurement in float32.
                except Exception as error:
                    reason = (
                        f"a float64 copy of the model fails ({str(error).partition(chr(10))[0]})"
                    )
        if ratio >= float32_error.WARNING_RATIO:
            float32_error.warn_of_lost_digits(layer, ratio, reason)
        return 0.0

    def _find_largest_mean(self) -> tuple[str, float]:
        """Return the normalization layer with the largest |mean|/std of its features, and that."""
        if not any(map(float32_error.is_normalization, self.model.modules())):
            return "", 0.0
        with (
            raise_on_all_ranks(self.process_group, self.device),
            torch.no_grad(),
            float32_error.record_means(self.model) as means,
        ):
            for index in range(len(self.pieces)):
                self.objective.forward(self.model, self._start_pass(index))
        ratios = {name: float(ratio) for name, ratio in means.items()}
        return max(ratios.items(), key=lambda item: item[1], default=("", 0.0))

    def _copy_in_float64(self) -> Self:
        """Return this operator for a float64 copy of the model and of the data."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model).double()
        twin.loss_module = LossModule(twin.model, self.objective)
        parameters = dict(twin.model.named_parameters())
        twin.layout = Layout({name: parameters[name] for name in self.layout.names})
        twin.parameters = [parameters[name] for name in self.layout.names]
        twin.pieces = [Piece(convert_to_float64(p.data), p.examples) for p in self.pieces]
        twin.about = replace(self.about, dtype=torch.float64)
        twin.dtype = torch.float64
        twin._unchecked_batch, twin._session_error, twin._open = None, None, False
        return twin

    def agree(self, numbers: Tensor) -> Tensor:
        """Return the first rank's numbers, so that all ranks stop at the same step."""
        if self.process_group is None:
            return numbers
        shared = numbers.to(self.device)
        first = distributed.get_global_rank(self.process_group, 0)
        distributed.broadcast(shared, src=first, group=self.process_group)
        return shared.to(numbers.device)

    def _start_pass(self, index: int) -> Any:
        """Prepare a pass with this piece, and return its data on the device."""
        data = move_to(self.pieces[index].data, self.device)
        self._passes.start(self.seed + self._first_piece + index)
        return data

    def _compute_loss(self, index: int) -> Tensor:
        return self._passes.finish(self.loss_module(self._start_pass(index)))

    def _gradient_of(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss that was just computed, as a flat vector."""
        return self.layout.join(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def _check_chunks(self) -> None:
        if self._unchecked_batch is None or self._chunk is None:
            return

        def compute(piece: Piece, gradient: bool) -> Tensor:
            data = move_to(piece.data, self.device)
            self._passes.start(self.seed)
            with torch.set_grad_enabled(gradient):
                loss = self._passes.finish(self.loss_module(data))
                if self._passes.used_randomness:
                    raise ValueError(
                        "chunk= cannot be checked if the model draws random numbers outside of "
                        "dropout layers; pass chunk=None, or call model.eval()"
                    )
                return self._gradient_of(loss) if gradient else loss.cpu().double()

        with model_state.disable_dropout(self.model):
            chunks = split_into_chunks([self._unchecked_batch], self._chunk)
            check_chunks(self._unchecked_batch, chunks, self.parameters, compute)
        self._unchecked_batch = None


_FINE, _FAILED, _NOT_FINITE = range(3)


@contextmanager
def raise_on_all_ranks(
    group: distributed.ProcessGroup | None, device: torch.device
) -> Iterator[None]:
    """Raise on every rank of the group when one of them raises.

    Otherwise the others would wait for it in their next collective call. This does not help where
    the block itself makes collective calls, as sharded models do.
    """
    if group is None:
        yield
        return
    try:
        yield
    except Exception as error:
        finite = not isinstance(error, NonFiniteProduct)
        _exchange(group, device, _FAILED if finite else _NOT_FINITE)
        raise
    states = _exchange(group, device, _FINE)
    failed = [rank for rank, state in enumerate(states) if state != _FINE]
    if failed:
        kind = NonFiniteProduct if _NOT_FINITE in states else RuntimeError
        ranks = ", ".join(map(str, failed))
        raise kind(f"rank {ranks} of process_group failed; see the error it raised")


def _exchange(group: distributed.ProcessGroup, device: torch.device, state: int) -> list[int]:
    states = torch.zeros(distributed.get_world_size(group), dtype=torch.int64, device=device)
    states[distributed.get_rank(group)] = state
    distributed.all_reduce(states, group=group)
    found: list[int] = states.tolist()
    return found
