"""BatchNorm statistics for the weights that will be evaluated.

Running statistics from training belong to the displaced weights w, not to w − μm.
`recalibrate_batchnorm` recomputes them for the weights that the model holds now, with
`torch.optim.swa_utils.update_bn`, and leaves everything else as it was: modes, momenta, random
number generators. If it fails, it restores the old statistics.
"""

import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn


def recalibrate_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    batches: int | None = None,
    device: int | torch.device | None = None,
) -> None:
    """Recompute the running statistics of every BatchNorm layer from the batches of `loader`.

    Args:
        model: its forward gets the batch, the first element of a tuple or list, or the entries of
            a dictionary as keyword arguments, as far as it has these.
        loader: training data; a few thousand examples are usually enough.
        batches: stop after this many; None uses all of them.
        device: move the tensors of each batch there first.

    Raises:
        ValueError: `batches` is below 1, or the loader gave no batch. The statistics are as before.

    Use it at the evaluation weights::

        with optimizer.evaluating():
            recalibrate_batchnorm(model, train_loader, batches=50)
            accuracy = evaluate(model)
    """
    if batches is not None and (not isinstance(batches, int) or batches < 1):
        raise ValueError(f"batches must be None or at least 1, got {batches!r}")
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not layers:
        return
    devices = {t.device for t in [*model.parameters(), *model.buffers()] if t.device.type == "cuda"}
    counted = _Counted(loader, batches)
    generator = getattr(loader, "generator", None)
    with _restored(model, layers), _forked_rng(devices, generator):
        update_bn(counted, _Call(model, device))
        if counted.seen == 0:
            raise ValueError("loader gave no batch, so there is nothing to compute statistics from")


class _Call(nn.Module):
    """Calls the model with a batch of any form."""

    def __init__(self, model: nn.Module, device: int | torch.device | None) -> None:
        super().__init__()
        self.model, self._device = model, device

    def forward(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            return self.model(self._move(batch))
        moved = {name: self._move(value) for name, value in batch.items()}
        try:
            inspect.signature(self.model.forward).bind(**moved)
        except TypeError:  # it takes the dictionary itself
            return self.model(moved)
        return self.model(**moved)

    def _move(self, value: Any) -> Any:
        movable = self._device is not None and hasattr(value, "to")
        return value.to(self._device) if movable else value


class _Counted:
    """The first items of an iterable, counted."""

    def __init__(self, items: Iterable[Any], limit: int | None) -> None:
        self.items = items
        self.limit = limit
        self.seen = 0

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader draws random numbers when iteration starts, so it must start here.
        for item in islice(self.items, self.limit):
            self.seen += 1
            yield item


@contextmanager
def _restored(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Restore modes and momenta at the end, and the statistics after an exception."""
    modes = {module: module.training for module in model.modules()}
    momenta = {layer: layer.momentum for layer in layers}
    statistics = [
        (buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)
    ]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, before in statistics:
                buffer.copy_(before)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
        for layer, momentum in momenta.items():
            layer.momentum = momentum


@contextmanager
def _forked_rng(devices: set[torch.device], generator: torch.Generator | None) -> Iterator[None]:
    """Preserve the random state of torch, the loader, Python and, if it is in use, NumPy."""
    loader_state = None if generator is None else generator.get_state()
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices]):
            yield
    finally:
        random.setstate(python_state)
        if generator is not None and loader_state is not None:
            generator.set_state(loader_state)
        if numpy:
            numpy.random.set_state(numpy_state)
