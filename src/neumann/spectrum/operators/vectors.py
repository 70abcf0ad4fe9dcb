"""Flat vectors: which parameters of a model they cover, where each one lies, and random directions.

A filter selects parameters: a list of glob patterns, each of which must match, or a function of the
name. Frozen parameters are never selected, and tied ones once, under their first name.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

Filter = Callable[[str], bool] | Iterable[str] | str


def select_parameters(model: nn.Module, wanted: Filter | None) -> dict[str, nn.Parameter]:
    """Return the trainable parameters whose name passes the filter, in the model's order."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not trainable:
        raise ValueError("model has no trainable parameters: none has requires_grad=True")
    selected = trainable if wanted is None else _apply_filter(trainable, wanted)
    _refuse_sparse_embeddings(model, selected)
    return selected


def _apply_filter(trainable: dict[str, nn.Parameter], wanted: Filter) -> dict[str, nn.Parameter]:
    patterns = [wanted] if callable(wanted) or isinstance(wanted, str) else list(wanted)

    def passes(name: str, pattern: Callable[[str], bool] | str) -> bool:
        return pattern(name) if callable(pattern) else fnmatchcase(name, pattern)

    idle = [each for each in patterns if not any(passes(name, each) for name in trainable)]
    if idle or not patterns:
        raise ValueError(
            f"parameters: {', '.join(map(repr, idle)) or '[]'} matches none of the trainable "
            f"parameters, which are {', '.join(trainable)}"
        )
    return {name: p for name, p in trainable.items() if any(passes(name, x) for x in patterns)}


def _refuse_sparse_embeddings(model: nn.Module, selected: Mapping[str, Tensor]) -> None:
    ids = {id(p) for p in selected.values()}
    for name, module in model.named_modules():
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if embeds and module.sparse and id(module.weight) in ids:
            raise ValueError(
                f"{name or 'the model'} is an embedding with sparse=True, whose gradients cannot "
                "be differentiated again; set its .sparse to False, which changes no value"
            )


class Layout:
    """Where each parameter lies in the flat vector."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        tensors = list(parameters.values())
        kinds = sorted({f"{p.dtype} on {p.device}" for p in tensors})
        if len(kinds) > 1:
            raise ValueError(f"the parameters must share one dtype and one device, got {kinds}")
        self.names = tuple(parameters)
        self.shapes = [p.shape for p in tensors]
        self.sizes = [p.numel() for p in tensors]
        self.total = sum(self.sizes)
        self.dtype, self.device = tensors[0].dtype, tensors[0].device

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return views of the flat vector, shaped like the parameters."""
        pieces = torch.split(flat, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def join(self, pieces: Sequence[Tensor | None]) -> Tensor:
        """Concatenate the pieces to a flat vector, with zeros where a piece is None."""
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        pairs = zip(pieces, self.sizes, strict=True)
        return torch.cat([zeros(size) if p is None else p.reshape(-1) for p, size in pairs])

    def flatten(self, by_name: Mapping[str, Tensor]) -> Tensor:
        """Concatenate one tensor per parameter name to a flat vector."""
        missing = [name for name in self.names if name not in by_name]
        if missing:
            raise ValueError(f"a tensor is missing for {', '.join(missing)}")
        pieces = [by_name[name].detach().to(self.device, self.dtype) for name in self.names]
        for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True):
            if piece.shape != shape:
                given = tuple(piece.shape)
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {given}")
        return self.join(pieces)


def random_unit(
    size: int, seed: int, dtype: torch.dtype, device: torch.device, draw: int = 0
) -> Tensor:
    """Draw a uniformly random vector of length 1; each `draw` of a seed gives another one.

    On the CPU, so that a seed means the same on every device. Users often draw weights and data
    from small seeds, and the bounds of Lanczos assume a start that is independent of them. So the
    seed is hashed together with a string of ours, which gives a stream that nobody else uses.
    """
    # 32 bits, because torch's generator uses no more of a seed.
    digest = hashlib.sha256(f"neumann.spectrum {int(seed)} {draw}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    vector = torch.randn(size, generator=generator, dtype=dtype)
    # Summed in float64: in float32 a million squares miss the length by 3e-5.
    return vector.div_(torch.linalg.vector_norm(vector, dtype=torch.float64)).to(device)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for norms and inner products: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
