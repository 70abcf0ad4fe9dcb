"""Where the tensors of a device are, and which program of a launch takes which part of them.

A `Layout` holds a record for each tensor (addresses and size), a list that gives each program its
tensor and group, and memory for coefficients and partial sums. It is valid until a tensor is
replaced or moves. Gradients move at every step, so their addresses are a column of their own.

The kernels see flat memory. A dense tensor is flat in any order of its dimensions, as long as
weight, gradient and state agree on the order. A gradient that does not agree is copied. A weight or
state that is not dense has a stand-in, filled before every step and copied back after it. Complex
tensors are pairs of reals.

A device trusts addresses: if a tensor were freed while its layout is in use, other memory would be
overwritten. So a layout keeps its tensors alive and compares their addresses before every use.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from neumann.optim.strides import is_dense
from neumann.optim.tensors import Tensors

SUPPORTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The same numbers as in the kernels.
RECORD, AT_SIZE, AT_FIRST = 8, 3, 4
COEFFICIENTS, AT_KEEP, AT_FOLLOW = 16, 0, 5


class Dtypes(NamedTuple):
    """The dtypes in memory that a kernel is compiled for; complex ones count as reals."""

    weight: torch.dtype
    gradient: torch.dtype
    iterate: torch.dtype
    offset: torch.dtype | None

    @property
    def arithmetic(self) -> torch.dtype:
        """float64 if the weights or their state are, else float32."""
        stored = (self.weight, self.iterate, self.offset)
        return torch.float64 if torch.float64 in stored else torch.float32

    @property
    def vector(self) -> int:
        """Elements at a time: 16 bytes of the widest dtype.

        With 16 bytes of the narrowest, Triton would pass the others through shared memory.
        """
        return 16 // max(dtype.itemsize for dtype in self if dtype is not None)


class Launch(NamedTuple):
    """Programs base, base + 1, … of the tensors that have these dtypes."""

    base: int
    programs: int
    dtypes: Dtypes


class Layout:
    """Where the tensors are; built once and used as long as `fits` is true."""

    def __init__(
        self, groups: Sequence[Tensors], device: torch.device, block: int, pad: int
    ) -> None:
        self.with_offsets = any(group.offsets is not None for group in groups)
        self._own = _flatten(groups)
        self._addresses = list(map(Tensor.data_ptr, chain(*self._own)))
        self._counts = [len(group.weights) for group in groups]
        self._references: list[Tensor] = []  # dense; gradients need their memory order
        self._stand_ins: list[tuple[Tensor, Tensor]] = []
        self.gradient_dtypes: list[torch.dtype] = []

        records: list[list[int]] = []
        buckets: dict[Dtypes, list[int]] = {}
        for group in groups:
            offsets: Iterable[Tensor | None] = group.offsets or repeat(None, len(group.weights))
            for weight, gradient, iterate, offset in zip(
                group.weights, group.gradients, group.iterates, offsets, strict=True
            ):
                _check(weight, gradient, iterate, offset, device)
                self.gradient_dtypes.append((weight if gradient is None else gradient).dtype)
                dtypes = Dtypes(
                    weight.dtype.to_real(),
                    self.gradient_dtypes[-1].to_real(),
                    iterate.dtype.to_real(),
                    None if offset is None else offset.dtype.to_real(),
                )
                buckets.setdefault(dtypes, []).append(len(records))
                records.append(self._record(weight, iterate, offset))

        self._strides = list(map(Tensor.stride, self._references))
        self._contiguous = all(map(Tensor.is_contiguous, self._references))
        self._real = not any(map(Tensor.is_complex, self._references))
        self.launches: list[Launch] = []
        programs = self._programs(records, buckets, block)
        self.programs = _send(programs, device)
        self.records = _send(torch.tensor(records or [[0] * RECORD], dtype=torch.int64), device)
        self.coefficients = torch.zeros(
            max(len(groups), 1), COEFFICIENTS, dtype=torch.float64, device=device
        )
        # A block sums its own squares, about a thousand positive numbers, in the dtype of the
        # arithmetic: a relative error of a few roundings. The partial sums are float64, because
        # there may be a hundred thousand of them; their traffic is small.
        self.sums = -(-max(len(programs), 1) // pad) * pad
        self.partials = torch.zeros(self.sums, dtype=torch.float64, device=device)
        self.pending = torch.zeros((), dtype=torch.int32, device=device)

    def _programs(
        self, records: list[list[int]], buckets: dict[Dtypes, list[int]], block: int
    ) -> Tensor:
        """Tensor and group of each program, int32; records launches and first programs."""
        group_of = torch.repeat_interleave(torch.tensor(self._counts, dtype=torch.int64))
        parts = [torch.empty(0, 2, dtype=torch.int64)]
        total = 0
        for dtypes, members in buckets.items():
            tensors = torch.tensor(members)
            blocks = torch.tensor([-(-records[member][AT_SIZE] // block) for member in members])
            firsts = total + blocks.cumsum(0) - blocks
            for member, first in zip(members, firsts.tolist(), strict=True):
                records[member][AT_FIRST] = first
            pairs = torch.stack([tensors, group_of[tensors]], dim=1)
            parts.append(pairs.repeat_interleave(blocks, dim=0))
            if len(parts[-1]):
                self.launches.append(Launch(total, len(parts[-1]), dtypes))
            total += len(parts[-1])
        return torch.cat(parts).to(torch.int32)

    def _record(self, weight: Tensor, iterate: Tensor, offset: Tensor | None) -> list[int]:
        """Addresses and size, with a stand-in for what is not dense."""
        reference = weight
        if not is_dense(weight.shape, weight.stride()) or _is_lazy(weight):
            reference = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self._stand_ins.append((weight, reference))
        self._references.append(reference)
        addresses = [reference.data_ptr()]
        for state in (iterate, offset):
            if state is not None and not _matches(state, reference):
                own, state = state, torch.empty_like(reference, dtype=state.dtype)
                self._stand_ins.append((own, state))
            addresses.append(0 if state is None else state.data_ptr())
        size = weight.numel() * (2 if weight.is_complex() else 1)
        record = [*addresses, size]
        return record + [0] * (RECORD - len(record))

    def fits(self, groups: Sequence[Tensors]) -> bool:
        """Whether these are the same tensors at the same addresses."""
        if [len(group.weights) for group in groups] != self._counts:
            return False
        own = _flatten(groups)
        if any(len(a) != len(b) for a, b in zip(own, self._own, strict=True)):
            return False
        # Identity first, which is fast; == would compare values on the device.
        for ours, mine in zip(own, self._own, strict=True):
            if not (all(map(is_, ours, mine)) or all(map(_is_alike, ours, mine))):
                return False
        return list(map(Tensor.data_ptr, chain(*own))) == self._addresses

    def gradient_addresses(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[list[int], list[Tensor]] | None:
        """An address for each gradient (0: it has none), and the copies among them.

        A gradient whose memory order differs from its weight's is copied. Returns None if a dtype
        changed.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients) and self._all_match(present):
            return list(map(Tensor.data_ptr, present)), []
        addresses: list[int] = []
        copies: list[Tensor] = []
        for gradient, reference, dtype in zip(
            gradients, self._references, self.gradient_dtypes, strict=True
        ):
            if gradient is None:
                addresses.append(0)
                continue
            if gradient.dtype is not dtype:
                return None
            if not _matches(gradient, reference):
                gradient = torch.empty_like(reference, dtype=dtype).copy_(gradient)
                copies.append(gradient)
            addresses.append(gradient.data_ptr())
        return addresses, copies

    def _all_match(self, gradients: Sequence[Tensor]) -> bool:
        """The common case, over whole lists: a loop over thousands of tensors would dominate."""
        if not self._real or [gradient.dtype for gradient in gradients] != self.gradient_dtypes:
            return False
        if self._contiguous:
            match = all(map(Tensor.is_contiguous, gradients))
        else:
            match = list(map(Tensor.stride, gradients)) == self._strides
        return match and not any(map(Tensor.is_neg, gradients))

    def set_idle_coefficients(self) -> None:
        """Set the coefficients of an update that changes nothing but sums δ² like any other."""
        self.coefficients.zero_()
        for at in (AT_KEEP, AT_FOLLOW):
            self.coefficients[:, at] = 1.0

    def fill_stand_ins(self) -> None:
        """Copy to the stand-ins what they stand for."""
        for own, stand_in in self._stand_ins:
            stand_in.copy_(own)

    def copy_stand_ins_back(self) -> None:
        """Copy the stand-ins to what they stand for."""
        for own, stand_in in self._stand_ins:
            own.copy_(stand_in)


def _flatten(groups: Sequence[Tensors]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return (
        [tensor for group in groups for tensor in group.weights],
        [tensor for group in groups for tensor in group.iterates],
        [tensor for group in groups for tensor in group.offsets or ()],
    )


def _check(
    weight: Tensor,
    gradient: Tensor | None,
    iterate: Tensor,
    offset: Tensor | None,
    device: torch.device,
) -> None:
    named = {"weight": weight, "gradient": gradient, "iterate": iterate, "offset": offset}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.device != device or tensor.layout != torch.strided:
            raise ValueError(
                f"{name} must be a dense tensor on {device}, got {tensor.layout} on {tensor.device}"
            )
        if tensor.shape != weight.shape or tensor.is_complex() != weight.is_complex():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, its weight has "
                f"{tuple(weight.shape)} and {weight.dtype}: they must match"
            )
        if tensor.dtype.to_real() not in SUPPORTED:
            raise TypeError(f"{name} has dtype {tensor.dtype}; supported are {SUPPORTED}")


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _is_lazy(tensor: Tensor) -> bool:
    """Whether memory holds the conjugate or the negative of the values."""
    return tensor.is_conj() or tensor.is_neg()


def _matches(tensor: Tensor, reference: Tensor) -> bool:
    """Whether both have the same memory order, given that the reference is dense."""
    if _is_lazy(tensor):
        return False
    strides = zip(tensor.stride(), reference.stride(), tensor.shape, strict=True)
    return all(a == b for a, b, size in strides if size > 1)


def _send(host: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and host.numel():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
