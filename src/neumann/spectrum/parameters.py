"""Which parameters a matrix is about, and their place in one flat vector.

A filter is a list of glob patterns, of which a name must match one, or a function of the name. A
pattern that matches nothing is an error. Frozen parameters are never taken. A tensor that the model
holds under two names is taken once, under the first of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

Filter = Callable[[str], bool] | Iterable[str] | str


def select(model: nn.Module, wanted: Filter | None) -> dict[str, nn.Parameter]:
    """The trainable parameters whose name passes, in the model's order."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not trainable:
        raise ValueError(
            "model has no trainable parameters; at least one must have requires_grad=True"
        )
    chosen = trainable if wanted is None else _passing(trainable, wanted)
    _refuse_sparse(model, chosen)
    return chosen


def _passing(trainable: dict[str, nn.Parameter], wanted: Filter) -> dict[str, nn.Parameter]:
    filters: list[tuple[object, Callable[[str], bool]]]
    if callable(wanted):
        filters = [(wanted, wanted)]
    else:
        patterns = [wanted] if isinstance(wanted, str) else list(wanted)
        filters = [(p, partial(fnmatchcase, pat=p)) for p in patterns]
    names = [[name for name in trainable if passes(name)] for _, passes in filters]
    idle = [one for (one, _), found in zip(filters, names, strict=True) if not found]
    if idle or not filters:
        raise ValueError(
            f"parameters: {', '.join(map(repr, idle)) or '[]'} passes none of the trainable "
            f"parameters, which are {', '.join(trainable)}"
        )
    return {name: p for name, p in trainable.items() if any(name in found for found in names)}


def _refuse_sparse(model: nn.Module, chosen: Mapping[str, Tensor]) -> None:
    taken = {id(p) for p in chosen.values()}
    for name, module in model.named_modules():
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if embeds and module.sparse and id(module.weight) in taken:
            raise ValueError(
                f"{name or 'the model'} is an embedding with sparse=True, whose gradients cannot "
                "be differentiated again; set its .sparse to False, which changes no value"
            )


class Layout:
    """Where each parameter lies in the flat vector."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        tensors = list(parameters.values())
        dtypes, devices = {p.dtype for p in tensors}, {p.device for p in tensors}
        if len(dtypes) > 1 or len(devices) > 1:
            raise ValueError(
                "the parameters must share one dtype and one device, got "
                f"{sorted(map(str, dtypes))} on {sorted(map(str, devices))}"
            )
        self.names = tuple(parameters)
        self.shapes = [p.shape for p in tensors]
        self.sizes = [p.numel() for p in tensors]
        self.total = sum(self.sizes)
        self.dtype, self.device = tensors[0].dtype, tensors[0].device

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of the flat vector, shaped like the parameters."""
        pieces = torch.split(flat, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def join(self, pieces: Sequence[Tensor | None]) -> Tensor:
        """One flat vector, with zeros where a piece is None."""
        if all(piece is not None for piece in pieces):
            return torch.cat([piece.reshape(-1) for piece in pieces if piece is not None])
        flat = torch.zeros(self.total, dtype=self.dtype, device=self.device)
        ends = accumulate(self.sizes)
        for end, size, piece in zip(ends, self.sizes, pieces, strict=True):
            if piece is not None:
                flat[end - size : end] = piece.reshape(-1)
        return flat

    def flatten(self, by_name: Mapping[str, Tensor]) -> Tensor:
        """A tensor for each name, as one flat vector."""
        missing = [name for name in self.names if name not in by_name]
        if missing:
            raise ValueError(f"a tensor is missing for {', '.join(missing)}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if by_name[name].shape != shape:
                given = tuple(by_name[name].shape)
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {given}")
        return self.join(
            [by_name[name].detach().to(self.device, self.dtype) for name in self.names]
        )
