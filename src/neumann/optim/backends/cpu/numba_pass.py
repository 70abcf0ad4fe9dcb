"""One pass over the memory of a list of parameters, through numba.

Computes the update (:mod:`neumann.optim.update`) and Σδ² of the new δ, for the next step's
distance. It reads four numbers per weight and writes three, once, for all tensors of the same
dtypes together; the warm-up leaves m alone, a reset leaves w and δ alone. Arithmetic is in float64
where weights, gradient or state are, else in float32.

A parameter is updated in place if w, g, m and δ are dense, agree on the order of their memory, and
hold float32, float64 or bfloat16. Any other parameter (sliced, complex and conjugated, float16,
with a gradient of another layout) is staged: what does not fit is copied, updated and copied back.
That is slower, with the same result.

The kernel writes through addresses, which autograd does not see; it is told which tensors changed.
Without numba nothing here works, and `unavailable` says so.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neumann.extras import describe_install
from neumann.optim.phases import IDLE, Coefficients
from neumann.optim.strides import is_dense
from neumann.optim.tensors import Tensors

if TYPE_CHECKING:
    from neumann.optim.backends.cpu.address_table import Table

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
            + describe_install("cpu")
        )
    if numba.config.DISABLE_JIT:
        return "the fused step on a CPU needs numba's compiler, which NUMBA_DISABLE_JIT turned off"
    return None


class Pass:
    """One pass over a list of parameters; keeps its address tables between steps.

    The tables are rebuilt when a tensor was replaced or moved, or when a gradient arrives with
    another dtype or layout. A gradient at another address costs almost nothing. One thread at a
    time may run a pass; several passes may run at once.
    """

    def __init__(self) -> None:
        self._kept: list[list[Tensor]] = []  # w, m and δ: those that the tables were made for
        self._places: list[list[int]] = []
        self._gradients: list[list[Any]] = []
        self._tables: list[Table] = []
        self._staged: list[int] = []  # indices of the parameters that are in no table

    def prepare(
        self,
        tensors: Tensors,
        coefficients: Coefficients,
        *,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> Callable[[], float]:
        """Get an update of w, m and δ ready: tables, copies and machine code.

        Args:
            tensors: on the CPU, of any dtype and strides, each with a gradient.
            coefficients: of this step. Terms whose coefficient is zero are dropped.
            rounding: of bfloat16 state, "nearest" or "stochastic". Weights round to nearest.
            seed: of stochastic rounding. The same seed and tensors give the same bits, so change
                it every step.

        Returns:
            A function that makes the update in place and returns Σδ² of the new δ, 0.0 where δ is
            not kept. Call it before this pass prepares another.
        """
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
        coefficients = Coefficients(*map(float, coefficients))
        noise = seed if rounding == "stochastic" else None
        self._arrange(tensors)
        runs = [table.prepare(coefficients, noise) for table in self._tables]
        if self._staged:
            entries = _list_entries(tensors)
            chosen = [entries[index] for index in self._staged]
            runs.append(_prepare_staged(self._staged, chosen, coefficients, noise))
        written = _list_written(tensors, coefficients)

        def update() -> float:
            squared = sum((run() for run in runs), 0.0)
            torch.autograd.graph.increment_version(written)
            return squared

        return update

    def _arrange(self, tensors: Tensors) -> None:
        """Rebuild the tables unless they still fit.

        The same tensor objects, of the same size at the same addresses, are the same memory.
        """
        gradients_given: list[Any] = tensors.gradients
        kept = [tensors.weights, tensors.iterates, tensors.offsets or []]
        reads = (Tensor.data_ptr, Tensor.numel)
        places = [list(map(read, column)) for column in kept for read in reads]
        gradients: list[list[Any]] = [
            [gradient.dtype for gradient in gradients_given],
            list(map(Tensor.numel, gradients_given)),
            list(map(Tensor.stride, gradients_given)),
            list(map(Tensor.is_neg, gradients_given)),
        ]
        if not (
            places == self._places
            and gradients == self._gradients
            and all(all(map(is_, old, new)) for old, new in zip(self._kept, kept, strict=True))
        ):
            self._places = []  # an interrupt must not leave new tables with the old places
            entries = _list_entries(tensors)
            flat = [index for index, entry in enumerate(entries) if _is_flat(entry)]
            self._tables = _build_tables(flat, [entries[index] for index in flat])
            self._staged = sorted(set(range(len(entries))) - set(flat))
            self._kept = list(map(list, kept))  # not the gradients: they would stay allocated
            self._places, self._gradients = places, gradients
        addresses = list(map(Tensor.data_ptr, gradients_given))
        for table in self._tables:
            table.set_gradients([addresses[index] for index in table.members])


def _list_entries(tensors: Tensors) -> list[_Entry]:
    entries = [tuple(tensor for tensor in entry if tensor is not None) for entry in tensors]
    for tensor in (tensor for entry in entries for tensor in entry):
        if not tensor.is_cpu:  # its address means something else there
            raise ValueError(
                f"a tensor is on {tensor.device}, and this kernel needs them on the CPU"
            )
    return entries


def _build_tables(members: Sequence[int], entries: Sequence[_Entry]) -> "list[Table]":
    """One table for each combination of dtypes."""
    from neumann.optim.backends.cpu.address_table import Table

    alike: dict[tuple[torch.dtype, ...], list[tuple[int, _Entry]]] = {}
    for member, entry in zip(members, entries, strict=True):
        alike.setdefault(tuple(tensor.dtype for tensor in entry), []).append((member, entry))
    return [Table([i for i, _ in those], [e for _, e in those]) for those in alike.values()]


def _list_written(tensors: Tensors, coefficients: Coefficients) -> list[Tensor]:
    """The tensors that an update with these coefficients changes."""
    from neumann.optim.backends.cpu.address_table import touches_iterate

    moves = bool(coefficients.carry or coefficients.push or coefficients.shrink)
    return [
        *(tensors.weights if moves else ()),
        *(tensors.iterates if touches_iterate(coefficients) else ()),
        *(tensors.offsets or () if moves or coefficients.follow != 1 else ()),
    ]


# ------------------------------------------------------------------ memory


def _is_flat(entry: _Entry) -> bool:
    """Whether the kernel can work on the tensors in place."""
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
    return tensor.stride() == like.stride() and is_dense(tensor.shape, tensor.stride())


# ------------------------------------------------------------------ staging


@torch.no_grad()
def _prepare_staged(
    members: Sequence[int],
    entries: Sequence[_Entry],
    coefficients: Coefficients,
    seed: int | None,
) -> Callable[[], float]:
    """Get an update of copies ready, of what the kernel cannot take; they are copied back."""
    fitted = [_fit(entry) for entry in entries]
    tables = _build_tables(members, fitted)
    runs = [table.prepare(coefficients, seed) for table in tables]
    # Offsets that are stored in a narrower dtype: the distance is that of the stored ones.
    narrowed = [
        (entry[_OFFSET], copies[_OFFSET])
        for entry, copies in zip(entries, fitted, strict=True)
        if len(entry) > _OFFSET and copies[_OFFSET].dtype != entry[_OFFSET].real.dtype
    ]
    measures = [table.prepare(IDLE, None) for table in tables] if narrowed else []

    @torch.no_grad()
    def update() -> float:
        squared = sum((run() for run in runs), 0.0)
        for entry, copies in zip(entries, fitted, strict=True):
            for index, (tensor, copy) in enumerate(zip(entry, copies, strict=True)):
                if index != _GRADIENT and tensor.data_ptr() != copy.data_ptr():
                    tensor.copy_(torch.view_as_complex(copy) if tensor.is_complex() else copy)
        if not narrowed:
            return squared
        for offset, copy in narrowed:
            copy.copy_(_to_plain(offset))
        return sum((measure() for measure in measures), 0.0)

    return update


def _fit(entry: _Entry) -> _Entry:
    """The tensors themselves where the kernel can take them, copies where it cannot."""
    weight = _to_plain(entry[0])
    if not is_dense(weight.shape, weight.stride()):
        weight = weight.contiguous()
    others = (_to_plain(tensor) for tensor in entry[1:])
    return (
        weight,
        *(tensor if _alike(tensor, weight) else _copy_like(weight, tensor) for tensor in others),
    )


def _to_plain(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that the kernel knows; complex tensors become pairs of reals."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _copy_like(like: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
