"""The data of a measurement: always the same batches, every example with the same weight.

The loss over a loader is the mean over its examples, so a batch of nᵦ of N examples counts nᵦ/N,
the ragged last one too:

    H = Σᵦ (nᵦ/N)·Hᵦ

A loader is read once and its batches are kept, where they are, so that shuffling and augmentation
cannot make a different matrix of each product. Chunks of a batch are weighted alike; they give the
same matrix only if no layer mixes examples, so they are refused for BatchNorm in mode "batch".
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A batch, or a chunk of one, as it goes through the model."""

    data: Any
    examples: int


def gather(
    batch: Any,
    loader: Iterable[Any] | None,
    batches: int | None,
    count: Callable[[Any], int] | None,
) -> list[Piece]:
    """The batches to measure on: the one given, or the first `batches` of the loader."""
    if (batch is None) == (loader is None):
        given = "neither" if batch is None else "both"
        raise ValueError(f"pass either batch= or loader=, got {given}")
    if batches is not None and (isinstance(batches, bool) or batches < 1 or loader is None):
        raise ValueError(
            f"batches counts what is taken of loader, at least 1; got {batches!r} with "
            f"{'loader' if loader is not None else 'batch'}="
        )
    count = count or examples_of
    items = [batch] if loader is None else islice(loader, batches)
    pieces = [Piece(item, count(item)) for item in items]
    if not pieces:
        raise ValueError("loader gave no batch, so there is nothing to measure on")
    for index, piece in enumerate(pieces):
        if piece.examples < 1:
            raise ValueError(f"batch {index} has {piece.examples} examples; it needs at least 1")
    return pieces


def chunked(pieces: list[Piece], chunk: int) -> list[Piece]:
    """The same examples, at most `chunk` at a time."""
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk must be None or a number of examples from 1, got {chunk!r}")
    found = []
    for piece in pieces:
        for start in range(0, piece.examples, chunk):
            stop = min(start + chunk, piece.examples)
            found.append(Piece(_slice(piece.data, start, stop, piece.examples), stop - start))
    return found


def examples_of(batch: Any) -> int:
    """The length of the first tensor in the batch."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise TypeError(
        f"cannot count the examples of a {type(batch).__name__}; batches are tensors, tuples, "
        "lists or mappings of tensors, or pass count="
    )


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _slice(batch: Any, start: int, stop: int, examples: int) -> Any:
    def part(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != examples:
            raise ValueError(
                f"chunk= needs batches whose tensors all have the {examples} examples in front, "
                f"got a tensor of shape {tuple(tensor.shape)}"
            )
        return tensor[start:stop]

    return _mapped(batch, part)


def _tensors(batch: Any) -> Iterable[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_mapped(value, change) for value in batch)
    return batch
