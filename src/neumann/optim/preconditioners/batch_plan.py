"""The plan of a step: which matrices form which batch, where they lie, and how they are scaled.

All of this follows from the shapes and strides of the gradients. It is worked out once and kept, so
that a step only looks up indices and strides. It needs few launches, too: each batch is gathered by
one or two torch.cat (one for each shape of matrix if it is padded), and directions that must be
copied to their layout are copied together for all tensors of that layout. On NVIDIA GPUs, one pass
each turns, scales and casts the matrices of a batch (`cuda.elementwise`).

Elsewhere the result has the bits of `orthogonalization.orthogonalize_many` and
`orthogonalize_batches`, which remain for tracers and for layouts whose matrices no strides can
describe.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neumann.optim.preconditioners import orthogonalization
from neumann.optim.preconditioners.cuda.elementwise import (
    can_copy_scaled,
    copy_scaled,
    find_factors,
)
from neumann.optim.preconditioners.matrix_view import MatrixView
from neumann.optim.strides import is_dense

MAX_CACHED_PLANS = 64  # one for each list of shapes that a P is applied to
MAX_BATCH_ELEMENTS = 2**27  # more would need memory, and be no faster
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Wide matrices inside every tensor of a layout."""

    layout: int
    count: int  # of matrices in a tensor
    rows: int
    columns: int
    stride: Ints  # of the batch (count, rows, columns) in the tensor
    offset: int
    scale: float  # of their directions
    first: int = 0  # position in the batch of the first tensor's

    @property
    def size(self) -> Ints:
        return self.count, self.rows, self.columns

    @property
    def tall(self) -> bool:
        """Whether the tensor holds the transposed matrices row by row."""
        return self.stride[1] < self.stride[2]


@dataclass(frozen=True)
class Layout:
    """Tensors of one shape and one stride, all dense."""

    indices: Ints
    shape: Ints
    stride: Ints
    numel: int


@dataclass(frozen=True)
class Batch:
    """Pieces that are orthogonalized together."""

    size: Ints  # (matrices, rows, columns)
    pieces: tuple[Piece, ...]  # in the order of the batch; if none is padded, tall ones last
    padded: bool
    largest: int  # elements of the largest of its tensors

    @property
    def count_wide(self) -> int:
        """Matrices before the first that is tall."""
        return min([p.first for p in self.pieces if p.tall], default=self.size[0])


@dataclass(frozen=True)
class Plan:
    layouts: tuple[Layout, ...]
    batches: tuple[Batch, ...]


def orthogonalize_planned(
    gradients: Sequence[Tensor], view: MatrixView, scale: float, scaling: str
) -> list[Tensor] | None:
    """The scaled UVᵀ of the matrices in each gradient, in its shape and strides.

    Args:
        gradients: tensors of one device and dtype, each with matrices as `view` says.
        view: `WHOLE`, or where the matrices are.
        scale: see `compute_scale`.
        scaling: see `compute_scale`.

    Returns:
        One direction for each gradient; None if there is no plan for these layouts.
    """
    if not gradients:
        return []
    first = gradients[0]
    plan = find_plan(
        view,
        scale,
        scaling,
        orthogonalization.launch_cost(first),
        tuple([gradient.shape for gradient in gradients]),
        tuple([gradient.stride() for gradient in gradients]),
    )
    return None if plan is None else _carry_out(plan, gradients)


def compute_scale(scale: float, scaling: str, shape: torch.Size) -> float:
    """What the orthogonal matrix of a layer of this shape (out, in, …) is multiplied by.

    With the `scaling` "rms" the elements get a root mean square of `scale`. With "norm" all layers
    change their outputs by the same amount, whatever their shape. See `spectral`.
    """
    outputs, channels, taps = shape[0], shape[1], shape[2:].numel()
    if scaling == "rms":
        return float(scale * max(outputs, channels * taps) ** 0.5)
    return float(scale * (outputs / (channels * taps**0.5)) ** 0.5)


@functools.lru_cache(MAX_CACHED_PLANS)
def find_plan(
    view: MatrixView,
    scale: float,
    scaling: str,
    launch_cost: float,
    shapes: tuple[Ints, ...],
    strides: tuple[Ints, ...],
) -> Plan | None:
    """The plan for gradients of these layouts; None if matrices cannot be described by strides."""
    chosen: dict[tuple[Ints, Ints], list[int]] = {}
    for index, layout in enumerate(zip(shapes, strides, strict=True)):
        chosen.setdefault(layout, []).append(index)
    layouts: list[Layout] = []
    pieces: list[Piece] = []
    for (shape, stride), indices in chosen.items():
        numel = torch.Size(shape).numel()
        for alike in _cut(indices, [numel] * len(indices)):
            found = _find_pieces(len(layouts), torch.Size(shape), stride, view, scale, scaling)
            if found is None:
                return None
            layouts.append(Layout(tuple(alike), tuple(shape), stride, numel))
            pieces += found
    sizes = {
        i: (len(layouts[p.layout].indices) * p.count, p.rows, p.columns)
        for i, p in enumerate(pieces)
    }
    batches = []
    groups = orthogonalization.group_sizes(sizes, launch_cost)
    for members in [part for group in groups for part in _cut_group(group, sizes)]:
        padded = len({sizes[i][1:] for i in members}) > 1
        if not padded:
            members.sort(key=lambda i: pieces[i].tall)
        rows, columns = (max(sizes[i][side] for i in members) for side in (1, 2))
        starts = itertools.accumulate((sizes[i][0] for i in members), initial=0)
        placed = tuple(
            replace(pieces[i], first=start) for i, start in zip(members, starts, strict=False)
        )
        total = sum(sizes[i][0] for i in members)
        largest = max(layouts[p.layout].numel for p in placed)
        batches.append(Batch((total, rows, columns), placed, padded, largest))
    return Plan(tuple(layouts), tuple(batches))


def _cut_group(group: list[int], sizes: Mapping[int, tuple[int, int, int]]) -> list[list[int]]:
    """A batch as several, if it is too large."""
    area = math.prod(max(sizes[i][side] for i in group) for side in (1, 2))
    return _cut(group, [area * sizes[i][0] for i in group])


def _cut(items: list[int], elements: list[int]) -> list[list[int]]:
    """The items in runs of at most MAX_BATCH_ELEMENTS elements; an item may be larger by itself."""
    runs: list[list[int]] = []
    total = 0
    for item, count in zip(items, elements, strict=True):
        if not runs or total + count > MAX_BATCH_ELEMENTS:
            runs.append([])
            total = 0
        runs[-1].append(item)
        total += count
    return runs


def _find_pieces(
    number: int, shape: torch.Size, stride: Ints, view: MatrixView, scale: float, scaling: str
) -> list[Piece] | None:
    """The matrices of a tensor as strides, if it is dense and they need no copy."""
    if not is_dense(shape, stride):
        return None
    tensor = torch.empty_strided(shape, stride, device="meta")
    wide, layers = orthogonalization.split_wide(tensor, view)
    if not all(batch is tensor or batch._base is tensor for batch in wide):
        return None
    pieces = [
        Piece(
            layout=number,
            count=batch.shape[0],
            rows=batch.shape[1],
            columns=batch.shape[2],
            stride=batch.stride(),
            offset=int(batch.storage_offset()),
            scale=compute_scale(scale, scaling, layer),
        )
        for batch, layer in zip(wide, layers, strict=True)
    ]
    return _merge(pieces)


def _merge(pieces: list[Piece]) -> list[Piece]:
    """Parts of equal shape, one below the other, as one batch."""
    first = pieces[0]
    step = pieces[1].offset - first.offset if len(pieces) > 1 else 0
    for number, piece in enumerate(pieces):
        if piece.size != (1, first.rows, first.columns) or piece.stride[1:] != first.stride[1:]:
            return pieces
        if piece.offset != first.offset + number * step or piece.scale != first.scale:
            return pieces
    if len(pieces) == 1:
        return pieces
    return [replace(first, count=len(pieces), stride=(step, *first.stride[1:]))]


# ------------------------------------------------------------------ a step


def _carry_out(plan: Plan, gradients: Sequence[Tensor]) -> list[Tensor]:
    buffers: dict[int, Tensor] = {}  # by layout: the directions of its tensors, one after the other
    scaled: list[Tensor] = []
    scales: list[float] = []
    like = gradients[0]
    for batch in plan.batches:
        in_one_pass = not batch.padded and can_copy_scaled(like, batch.largest)
        # The gathered batch is freed before the iteration.
        gather = _gather_in_order if in_one_pass else _gather_normalized
        result = orthogonalization.iterate(gather(batch, plan, gradients))
        for piece in batch.pieces:
            layout = plan.layouts[piece.layout]
            if in_one_pass:
                _scatter_scaled(piece, layout, result, buffers, like.dtype)
            else:
                scaled.append(_scatter(piece, layout, batch, result, buffers, like.dtype))
                scales.append(piece.scale)
    if scaled:
        torch._foreach_mul_(scaled, scales)
    found: list[Tensor | None] = [None] * len(gradients)
    for number, layout in enumerate(plan.layouts):
        for index, direction in zip(layout.indices, buffers[number].unbind(), strict=True):
            found[index] = direction
    return found  # type: ignore[return-value]  # every index is in one layout


def _gather_normalized(batch: Batch, plan: Plan, gradients: Sequence[Tensor]) -> Tensor:
    return orthogonalization.normalize(_gather(batch, plan, gradients), overwrite=True)


def _gather_in_order(batch: Batch, plan: Plan, gradients: Sequence[Tensor]) -> Tensor:
    """The same with each matrix read in the order in which it lies, and turned on the way back."""
    total, rows, columns = batch.size
    split = batch.count_wide
    sources: dict[bool, list[Tensor]] = {False: [], True: []}
    for piece in batch.pieces:
        for found in _find_sources(piece, plan, gradients):
            sources[piece.tall].append(found.mT if piece.tall else found)
    stack = gradients[0].new_empty(total, rows, columns)
    wide, tall = stack[:split], stack[split:].view(total - split, columns, rows)
    for place, given in ((wide, sources[False]), (tall, sources[True])):
        if given:
            torch.cat(given, out=place)
    factors = find_factors(stack)
    x = torch.empty_like(stack, dtype=orthogonalization.choose_dtype(stack))
    torch.mul(wide, factors[:split], out=x[:split])
    copy_scaled(tall.mT[None], x[None, split:], factors[split:])
    return x


def _gather(batch: Batch, plan: Plan, gradients: Sequence[Tensor]) -> Tensor:
    """One batch. Rows and columns of zeros stay zeros and do not affect the others."""
    sources: dict[tuple[int, int], list[Tensor]] = {}
    for piece in batch.pieces:
        own = sources.setdefault((piece.rows, piece.columns), [])
        own += _find_sources(piece, plan, gradients)
    if not batch.padded:
        (alike,) = sources.values()
        return torch.cat(alike)
    stack = gradients[0].new_zeros(batch.size)
    first = 0
    for (rows, columns), alike in sources.items():
        end = first + sum([len(source) for source in alike])
        torch.cat(alike, out=stack[first:end, :rows, :columns])
        first = end
    return stack


def _find_sources(piece: Piece, plan: Plan, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The matrices of a piece in each tensor of its layout."""
    found = [gradients[index] for index in plan.layouts[piece.layout].indices]
    size, stride, offset = piece.size, piece.stride, piece.offset
    return [g.as_strided(size, stride, g.storage_offset() + offset) for g in found]


def _scatter_scaled(
    piece: Piece, layout: Layout, result: Tensor, buffers: dict[int, Tensor], dtype: torch.dtype
) -> None:
    """Put the scaled directions of a piece where its layout has them."""
    tensors = len(layout.indices)
    _, rows, columns = result.shape
    area = rows * columns
    size, stride = (tensors, *piece.size), (piece.count * area, area, columns, 1)
    if piece.layout not in buffers:
        buffers[piece.layout] = result.new_empty_strided(
            (tensors, *layout.shape), (layout.numel, *layout.stride), dtype=dtype
        )
    place = buffers[piece.layout].as_strided(size, (layout.numel, *piece.stride), piece.offset)
    start = result.storage_offset() + piece.first * area
    copy_scaled(result.as_strided(size, stride, start), place, piece.scale)


def _scatter(
    piece: Piece,
    layout: Layout,
    batch: Batch,
    result: Tensor,
    buffers: dict[int, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Put the directions of a piece where its layout has them; returns them for scaling."""
    tensors, numel = len(layout.indices), layout.numel
    _, rows, columns = batch.size
    area = rows * columns
    size, stride = (tensors, *piece.size), (numel, *piece.stride)
    start = result.storage_offset() + piece.first * area
    in_place = (area * piece.count, area, columns, 1)
    if stride == in_place and piece.size[1:] == (rows, columns):
        whole = result.as_strided((tensors, *layout.shape), (numel, *layout.stride), start)
        buffers[piece.layout] = whole.to(dtype)
        return buffers[piece.layout]
    if piece.layout not in buffers:
        buffers[piece.layout] = result.new_empty_strided(
            (tensors, *layout.shape), (numel, *layout.stride), dtype=dtype
        )
    place = buffers[piece.layout].as_strided(size, stride, piece.offset)
    place.copy_(result.as_strided(size, in_place, start))
    # All of a buffer, if there is nothing else in it: foreach prefers dense tensors.
    return buffers[piece.layout] if piece.count * piece.rows * piece.columns == numel else place
