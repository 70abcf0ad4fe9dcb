"""A moving average of the weights along a run, to be evaluated in their place (`--ema`).

After step n

    average ← d·average + (1 − d)·weights,    d = min(decay, (1 + n)/(10 + n)),

as in TensorFlow's ExponentialMovingAverage, which the paper's Inception baselines use: the second
form lets a short run forget its initial weights. `weights` are those that would be evaluated
otherwise, for Neumann w − μm. The running statistics of BatchNorm are averaged too.

Each process averages what it has: all weights, or its shards of them. Running statistics differ
between processes, and their mean over processes is evaluated.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from neumann.lab.errors import UsageError
from neumann.lab.training.batchnorm_layers import average_statistics, get_statistics
from neumann.lab.training.processes import Process
from neumann.optim import Neumann
from neumann.optim.distributed import reshard_models
from neumann.optim.dtensor import distribute_like, local_part, place_like


class WeightAverage:
    """The average of a model's weights and running statistics. It starts at the initial ones."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float) -> None:
        if not isinstance(optimizer, Neumann) and callable(getattr(optimizer, "eval", None)):
            kind = type(optimizer).__name__
            raise UsageError(f"--ema: {kind} evaluates an average of its own; leave --ema out")
        self._model, self._optimizer, self._decay = model, optimizer, decay
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
        self._names = [names[p] for p in self._parameters]
        self._average = [tensor.clone() for tensor in self._list_held()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        merge: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        merge(self._average, self._list_current(), None)

    @contextmanager
    def in_place_of_weights(self, process: Process) -> Iterator[None]:
        """Put the average into the model, and what it held back after the block."""
        held = [tensor.clone() for tensor in self._list_held()]
        try:
            self._write(self._average)
            average_statistics(self._model, process)
            yield
        finally:
            self._write(held)

    def get_state(self) -> dict[str, Tensor]:
        """Return the average weights by name, whole; all processes must call this."""
        count = len(self._parameters)
        whole = [
            place_like(distribute_like(average, p), average).cpu()
            for p, average in zip(self._parameters, self._average[:count], strict=True)
        ]
        return dict(zip(self._names, whole, strict=True))

    def get_statistics(self) -> list[Tensor]:
        """Return the average running statistics of this process."""
        return [average.cpu() for average in self._average[len(self._parameters) :]]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], statistics: list[Tensor]) -> None:
        """Adopt what `get_state` and `get_statistics` returned."""
        own = [
            local_part(place_like(weights[name], p))
            for name, p in zip(self._names, self._parameters, strict=True)
        ]
        for average, saved in zip(self._average, [*own, *statistics], strict=True):
            if average.shape != saved.shape:
                raise ValueError(f"the average must have shape {average.shape}, got {saved.shape}")
            average.copy_(saved)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._list_held(), values)
        reshard_models()

    def _list_held(self) -> list[Tensor]:
        """List the weights and running statistics that the model holds now."""
        statistics = [each for each in get_statistics(self._model) if each.is_floating_point()]
        return [local_part(p.detach()) for p in self._parameters] + statistics

    def _list_current(self) -> list[Tensor]:
        """List the same with the evaluation weights, which the model may not hold."""
        held = self._list_held()
        if not isinstance(self._optimizer, Neumann):
            return held
        found = self._optimizer.eval_params()
        weights = list(found.values()) if isinstance(found, dict) else found
        return [*map(local_part, weights), *held[len(weights) :]]
