"""The data of a measurement: fixed batches in which every example has the same weight.

    H = Σᵦ (nᵦ/N)·Hᵦ        over batches b of nᵦ out of N examples

A loader is read once and its batches are kept: shuffling and augmentation would make each product
belong to a different matrix. They are copied unless they come from a list, because a loader may
reuse its tensors.

A batch can be split into chunks if neither a layer nor the loss mixes examples, and the loss is
their mean. `check_chunks` compares the loss of the whole batch, and the gradient of the first two
chunks together, which takes no more memory than a product with one of them. Both may differ by
rounding: by some units, and by what a change of all weights by a few units does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from neumann.spectrum.operators.model_state import preserve_weights, without_tf32
from neumann.validation import require, require_integer

ROUNDING_UNITS = 100.0  # times eps and the size of the chunks' values: no real difference
PERTURBATION_UNITS = 16.0  # relative change of the weights, times eps: enough to change rounding
PERTURBATION_FACTOR = 2.0  # times what the perturbation changes: no real difference


@dataclass(frozen=True)
class Piece:
    """A batch, or a chunk of one, that goes through the model at once."""

    data: Any
    examples: int


def collect_batches(
    batch: Any,
    loader: Iterable[Any] | None,
    batches: int | None,
    count: Callable[[Any], int] | None,
) -> list[Piece]:
    """Return the given batch, or the first `batches` of the loader."""
    if (batch is None) == (loader is None):
        given = "neither" if batch is None else "both"
        raise ValueError(f"pass either batch= or loader=, got {given}")
    if batches is not None and (isinstance(batches, bool) or batches < 1 or loader is None):
        raise ValueError(f"batches must be at least 1 and needs loader=, got {batches!r}")
    if isinstance(loader, Dataset):
        raise TypeError(
            f"loader must yield batches, but {type(loader).__name__} is a dataset, which yields "
            "examples; pass DataLoader(dataset, batch_size=…)"
        )
    count = count or count_examples
    items: Iterable[Any] = [batch] if loader is None else islice(loader, batches)
    if not isinstance(loader, list | tuple | None):
        items = (_map_tensors(item, _copy) for item in items)
    pieces = [Piece(item, count(item)) for item in items]
    if not pieces:
        raise ValueError("loader yielded no batch, so there is nothing to measure on")
    for index, piece in enumerate(pieces):
        require(piece.examples > 0, f"the examples of batch {index}", piece.examples, "at least 1")
    return pieces


def count_examples(batch: Any) -> int:
    """Return the length of the first tensor in the batch that has one."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise TypeError(
        f"cannot count the examples of a {type(batch).__name__}; pass count=, or batches that are "
        "tensors, or tuples, lists or mappings of tensors"
    )


def check_pairs(pieces: list[Piece]) -> None:
    """Raise TypeError unless every batch is a pair of inputs and targets."""
    for piece in pieces:
        sequence = isinstance(piece.data, tuple | list)
        if not sequence or len(piece.data) != 2:
            given = type(piece.data).__name__ + (f" of {len(piece.data)}" if sequence else "")
            raise TypeError(
                "a loss that is a function of outputs and targets needs batches that are pairs "
                f"(inputs, targets), got a {given}; for other batches pass an Objective"
            )


def split_into_chunks(pieces: list[Piece], chunk: int) -> list[Piece]:
    """Return the same examples, at most `chunk` at a time."""
    require_integer("chunk", chunk, least=1)
    return [
        _take(piece, start, min(start + chunk, piece.examples))
        for piece in pieces
        for start in range(0, piece.examples, chunk)
    ]


def check_chunks(
    whole: Piece,
    chunks: Sequence[Piece],
    parameters: Sequence[Tensor],
    compute: Callable[[Piece, bool], Tensor],
) -> None:
    """Raise ValueError if the chunks define a different function of the weights than the whole.

    `compute` returns the loss of a piece in float64, or its gradient if the second argument is set.
    """
    device = parameters[0].device
    with torch.autocast(device.type, enabled=False), without_tf32(device):
        _compare("loss", lambda piece: compute(piece, False), whole, chunks, parameters)
        two = chunks[:2]
        pair = _take(whole, 0, sum(chunk.examples for chunk in two))
        _compare("gradient", lambda piece: compute(piece, True), pair, two, parameters)


def _compare(
    name: str,
    compute: Callable[[Piece], Tensor],
    whole: Piece,
    chunks: Sequence[Piece],
    parameters: Sequence[Tensor],
) -> None:
    expected = compute(whole)
    found, scale = torch.zeros_like(expected), 0.0
    for chunk in chunks:
        part = compute(chunk) * (chunk.examples / whole.examples)
        found += part
        scale += float(torch.linalg.vector_norm(part))
    eps = torch.finfo(parameters[0].dtype).eps
    with preserve_weights(parameters):
        with torch.no_grad():
            for p in parameters:
                p.mul_(1 + PERTURBATION_UNITS * eps)
        noise = float(torch.linalg.vector_norm(compute(whole) - expected))
    difference = float(torch.linalg.vector_norm(found - expected))
    if difference > ROUNDING_UNITS * eps * scale + PERTURBATION_FACTOR * noise:
        raise ValueError(
            f"chunk= changes the {name} by a fraction of {difference / max(difference, scale):.1e}:"
            " a layer or the loss mixes the examples of a batch, or the loss is not their mean; "
            "pass chunk=None"
        )


def floating_tensors(batch: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(batch) if tensor.is_floating_point()]


def replace_floating_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the batch with its floating-point tensors replaced, in their order."""
    others = iter(tensors)
    return _map_tensors(batch, lambda old: next(others) if old.is_floating_point() else old)


def convert_to_float64(batch: Any) -> Any:
    """Return the batch with its floating-point tensors in float64."""
    return _map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)


def move_to(batch: Any, device: torch.device) -> Any:
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _copy(tensor: Tensor) -> Tensor:
    # Stay pinned, because every pass moves the batch to the device.
    return tensor.clone().pin_memory() if tensor.is_pinned() else tensor.clone()


def _take(piece: Piece, start: int, stop: int) -> Piece:
    def part(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != piece.examples:
            raise ValueError(
                f"chunk= needs batches whose tensors all have the {piece.examples} examples in "
                f"their first dimension, got a tensor of shape {tuple(tensor.shape)}"
            )
        return tensor[start:stop]

    return Piece(_map_tensors(piece.data, part), stop - start)


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(batch, collect)
    return found


def _map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_map_tensors(value, change) for value in batch)
    return batch
