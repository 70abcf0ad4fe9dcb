"""The data of a measurement: always the same batches, every example with the same weight.

The loss over a loader is the mean over its examples, so a batch of nᵦ of N examples counts nᵦ/N,
the ragged last one too:

    H = Σᵦ (nᵦ/N)·Hᵦ

A loader is read once and its batches are kept, where they are, so that shuffling and augmentation
cannot make a different matrix of each product; copies of them, unless it is a list, since a loader
may fill the same tensors again. Chunks of a batch are weighted alike; whether they give the same
matrix is seen to in `chunks`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


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
    if isinstance(loader, Dataset):
        raise TypeError(
            f"loader must give batches, and {type(loader).__name__} is a dataset, which gives "
            "examples; pass DataLoader(dataset, batch_size=…), with batch_size=None if its items "
            "are batches"
        )
    count = count or examples_of
    items: Iterable[Any] = [batch] if loader is None else islice(loader, batches)
    if not isinstance(loader, list | tuple | None):
        items = (_mapped(item, _copy) for item in items)
    pieces = [Piece(item, count(item)) for item in items]
    if not pieces:
        raise ValueError("loader gave no batch, so there is nothing to measure on")
    for index, piece in enumerate(pieces):
        if piece.examples < 1:
            raise ValueError(f"batch {index} has {piece.examples} examples; it needs at least 1")
    return pieces


def first_of(piece: Piece, examples: int) -> Piece:
    """The first examples of a batch."""
    return Piece(_slice(piece.data, 0, examples, piece.examples), examples)


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


def pairs_only(pieces: list[Piece]) -> None:
    """Refuse batches of which a plain loss would take wrong parts."""
    for piece in pieces:
        if not isinstance(piece.data, tuple | list) or len(piece.data) != 2:
            given = type(piece.data).__name__
            if isinstance(piece.data, tuple | list):
                given += f" of {len(piece.data)}"
            raise TypeError(
                "a loss that is a function of outputs and targets needs batches that are pairs "
                f"(inputs, targets), got a {given}; for other batches pass an Objective, such as "
                "Objective(lambda model, batch: model(batch), lambda output, batch: "
                "loss(output, batch))"
            )


def with_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The batch with its tensors of real numbers replaced, in their order."""
    others = iter(tensors)
    return _mapped(batch, lambda old: next(others) if old.is_floating_point() else old)


def real_tensors(batch: Any) -> list[Tensor]:
    """The tensors of the batch that hold real numbers."""
    return [tensor for tensor in _tensors(batch) if tensor.is_floating_point()]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _copy(tensor: Tensor) -> Tensor:
    # Pinned as before, since it is moved to the device at each pass.
    return tensor.clone().pin_memory() if tensor.is_pinned() else tensor.clone()


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
