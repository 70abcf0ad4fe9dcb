"""The one update on a CPU as one pass over memory, through numba.

    d  = ±g + λ·w + c·δ
    m  ← a·m − e·d
    s  = b·m − f·d − z·w
    w  ← w + s
    δ  ← h·(δ + s)

and Σδ² of the new δ, for the next step's distance. Four numbers a weight are read and three
written, once, for all tensors of the same dtypes together; in the warm-up m is left alone, at a
reset w and δ. Arithmetic is in float64 where weights, gradient or state are, else in float32.

A parameter is updated where it lies if the memory of its w, g, m and δ runs in the same order
without gaps and holds float32, float64 or bfloat16. Any other (sliced, of another layout than its
gradient, complex and conjugated, float16) is staged, slower and just as right: what does not fit is
copied, updated there and copied back.

The tensors are written through their addresses, so nothing of it is recorded by autograd; it is
told that they changed. Without numba nothing here works, and `unavailable` says so.
"""

from collections.abc import Sequence
from importlib import import_module
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neumann.optim.phases import IDLE, Row
from neumann.optim.update import Tensors

if TYPE_CHECKING:
    from neumann.optim.kernels.cpu_table import Table

ROUNDINGS = ("nearest", "stochastic")

_NATIVE = (torch.float32, torch.float64, torch.bfloat16)
_Entry = tuple[Tensor, ...]  # w, g, m and, where it is kept, δ
_GRADIENT, _OFFSET = 1, 3


def unavailable() -> str | None:
    """Why this kernel cannot run here; None if it can."""
    try:
        numba = import_module("numba")
    except ImportError as error:
        return (
            f"the fused step on a CPU needs numba, and importing it failed ({error}): "
            "`pip install neumann-optimizer[cpu]` helps"
        )
    if numba.config.DISABLE_JIT:
        return "the fused step on a CPU needs numba's compiler, which NUMBA_DISABLE_JIT turned off"
    return None


class Pass:
    """One pass over a list of parameters; keeps its tables of addresses between steps.

    The tables are made anew when a tensor was replaced or moved, or when a gradient came with
    another dtype or layout; a gradient that only lies elsewhere costs next to nothing. One thread
    at a time may run a pass; several passes may run at once.
    """

    def __init__(self) -> None:
        self._kept: list[list[Tensor]] = []  # w, m and δ: those that the tables were made for
        self._places: list[list[int]] = []
        self._gradients: list[list[Any]] = []
        self._tables: list[Table] = []
        self._staged: list[int] = []  # indices of the parameters that are in no table

    def run(
        self,
        tensors: Tensors,
        row: Row,
        force: float,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        grad_scale: float = 1.0,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> float:
        """Update w, m and δ in place; returns Σδ² of the new δ, 0.0 where δ is not kept.

        Args:
            tensors: on the CPU, of any dtype and strides. The gradients are only read.
            row: the phase's coefficients, as numbers. One that is zero drops its term.
            force: c, without meaning where δ is not kept.
            weight_decay: λ of L2 decay.
            maximize: negate the gradients.
            grad_scale: a factor on the gradients.
            rounding: of bfloat16 state, "nearest" or "stochastic". Weights round to nearest.
            seed: of stochastic rounding; the same seed and tensors give the same bits, so change
                it every step.
        """
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding={rounding!r}: must be one of {', '.join(ROUNDINGS)}")
        row = Row(*map(float, row))
        scale = -grad_scale if maximize else grad_scale
        noise = seed if rounding == "stochastic" else None
        arguments = (row, float(force), float(weight_decay), float(scale), noise)
        self._arrange(tensors)
        squared = sum((table.run(*arguments) for table in self._tables), 0.0)
        if self._staged:
            entries = _entries(tensors)
            squared += _run_staged(self._staged, [entries[i] for i in self._staged], arguments)
        torch.autograd.graph.increment_version(_written(tensors, row))
        return squared

    def _arrange(self, tensors: Tensors) -> None:
        """Make the tables fit the tensors. What it compares could not stay and mean other memory:
        the same tensor objects, each where it was and as large as it was."""
        kept = [tensors.weights, tensors.iterates, tensors.offsets or []]
        places = [list(map(read, of)) for of in kept for read in (Tensor.data_ptr, Tensor.numel)]
        gradients: list[list[Any]] = [
            [gradient.dtype for gradient in tensors.gradients],
            list(map(Tensor.numel, tensors.gradients)),
            list(map(Tensor.stride, tensors.gradients)),
            list(map(Tensor.is_neg, tensors.gradients)),
        ]
        if not (
            places == self._places
            and gradients == self._gradients
            and all(all(map(is_, old, new)) for old, new in zip(self._kept, kept, strict=True))
        ):
            entries = _entries(tensors)
            flat = [index for index, entry in enumerate(entries) if _is_flat(entry)]
            self._tables = _tables(flat, [entries[index] for index in flat])
            self._staged = sorted(set(range(len(entries))) - set(flat))
            self._kept = [list(of) for of in kept]  # but no gradient, which would stay allocated
            self._places, self._gradients = places, gradients
        addresses = list(map(Tensor.data_ptr, tensors.gradients))
        for table in self._tables:
            table.set_gradients([addresses[index] for index in table.members])


def _entries(tensors: Tensors) -> list[_Entry]:
    entries = [tuple(tensor for tensor in entry if tensor is not None) for entry in tensors]
    for tensor in (tensor for entry in entries for tensor in entry):
        if not tensor.is_cpu:  # its address would mean something else here
            raise ValueError(
                f"a tensor is on {tensor.device}, and this kernel needs them on the CPU"
            )
    return entries


def _tables(members: Sequence[int], entries: Sequence[_Entry]) -> "list[Table]":
    """The entries sorted by their dtypes, a table for each combination."""
    from neumann.optim.kernels.cpu_table import Table

    alike: dict[tuple[torch.dtype, ...], list[tuple[int, _Entry]]] = {}
    for member, entry in zip(members, entries, strict=True):
        alike.setdefault(tuple(tensor.dtype for tensor in entry), []).append((member, entry))
    return [Table([i for i, _ in those], [e for _, e in those]) for those in alike.values()]


def _written(tensors: Tensors, row: Row) -> list[Tensor]:
    """The tensors that the row changes."""
    from neumann.optim.kernels.cpu_table import touches_iterate

    moves = bool(row.carry or row.push or row.decay)
    return [
        *(tensors.weights if moves else ()),
        *(tensors.iterates if touches_iterate(row) else ()),
        *(tensors.offsets or () if moves or row.follow != 1 else ()),
    ]


# ------------------------------------------------------------------ memory


def _is_flat(entry: _Entry) -> bool:
    """Whether the kernel can work on the tensors where they lie."""
    weight = entry[0]
    return all(
        tensor.dtype in _NATIVE and not tensor.is_neg() and _alike(tensor, weight)
        for tensor in entry
    )


def _alike(tensor: Tensor, like: Tensor) -> bool:
    """Whether both fill their memory without gaps, and in the same order."""
    if tensor.shape != like.shape:
        return False
    if tensor.is_contiguous():  # strides of dimensions of size 1 mean nothing
        return like.is_contiguous()
    return tensor.stride() == like.stride() and _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, in any order of the dimensions."""
    # Of a dense tensor, and only of such, torch keeps the strides.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# ------------------------------------------------------------------ staging


@torch.no_grad()
def _run_staged(
    members: Sequence[int], entries: Sequence[_Entry], arguments: tuple[Any, ...]
) -> float:
    """Update copies of what the kernel cannot take as it is, and copy them back."""
    fitted = [_fitted(entry) for entry in entries]
    tables = _tables(members, fitted)
    squared = sum((table.run(*arguments) for table in tables), 0.0)
    narrowed = False
    for entry, copies in zip(entries, fitted, strict=True):
        for index, (tensor, copy) in enumerate(zip(entry, copies, strict=True)):
            if index == _GRADIENT or tensor.data_ptr() == copy.data_ptr():
                continue
            tensor.copy_(torch.view_as_complex(copy) if tensor.is_complex() else copy)
            if index == _OFFSET and copy.dtype != tensor.real.dtype:
                copy.copy_(_plain(tensor))
                narrowed = True
    if narrowed:  # the distance is that of the offsets as they were stored
        squared = sum((table.run(IDLE, 0.0, 0.0, 1.0, None) for table in tables), 0.0)
    return squared


def _fitted(entry: _Entry) -> _Entry:
    """The tensors themselves where the kernel can take them, copies where it cannot."""
    weight = _plain(entry[0])
    if not _is_dense(weight):
        weight = weight.contiguous()
    others = (_plain(tensor) for tensor in entry[1:])
    return (
        weight,
        *(tensor if _alike(tensor, weight) else _copied_like(weight, tensor) for tensor in others),
    )


def _plain(tensor: Tensor) -> Tensor:
    """The tensor in numbers that the kernel knows; complex ones are pairs of reals."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _copied_like(like: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
