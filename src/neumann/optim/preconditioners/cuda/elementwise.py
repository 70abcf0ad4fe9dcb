"""P's elementwise arithmetic in one pass over memory, for large tensors on NVIDIA GPUs.

torch._foreach takes all tensors together, but once for every operation: momentum moves 32 bytes per
weight, the diagonal P 64. These kernels move 16. They take one tensor each, so small tensors, for
which launches cost more than traffic, stay with torch._foreach.

`copy_scaled` brings matrices to the dtype and the layout of a batch and back. torch would take one
pass for each of dtype and scale, and transposes at a fifth of the speed of a copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from neumann.optim.preconditioners.cuda.launch import is_aligned, launch
from neumann.optim.preconditioners.cuda.symmetric_product import can_run
from neumann.optim.strides import is_dense
from neumann.optim.triton_runtime import is_interpreted

LEAST_ELEMENTS = 2**20  # 4 µs of traffic saved, about what a launch costs the host
BLOCK = 1024  # elements per program
NORM_BLOCK = 4096  # elements per program of a norm
TILE = 64  # rows and columns per program of a copy


def split_by_size(*lists: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The places in these lists that the kernels take, and the others."""
    first = lists[0]
    large = []
    if first and first[0].is_cuda and not torch.compiler.is_compiling():
        large = [i for i, t in enumerate(first) if t.numel() >= LEAST_ELEMENTS]
        large = [i for i in large if _is_flat([tensors[i] for tensors in lists])]
        large = large if can_run(first[0].device.index) else []
    taken = set(large)
    return large, [i for i in range(len(first)) if i not in taken]


def apply_momentum(gradient: Tensor, past: Tensor, decay: float) -> Tensor:
    """g + decay·b, after b ← decay·b + g in `past`."""
    out = torch.empty_like(gradient)
    _launch("momentum_kernel", [gradient, past, out], past, (decay,))
    return out


def apply_diagonal(
    gradient: Tensor, squares: Tensor, correction: Tensor, decay: float, eps: float, scale: float
) -> Tensor:
    """scale·g / (√v/correction + ε), after v ← decay·v + (1 − decay)·g² in `squares`."""
    out = torch.empty_like(gradient)
    numbers = (decay, 1 - decay, eps, scale)
    _launch("diagonal_kernel", [gradient, squares, correction, out], squares, numbers)
    return out


def find_factors(batch: Tensor) -> Tensor:
    """What gives each matrix of a contiguous float32 batch a norm of 1, as (b, 1, 1).

    Squares are summed in float64, where they do not overflow.
    """
    from neumann.optim.preconditioners.cuda.elementwise_kernels import squares_kernel

    count, size = len(batch), batch[0].numel()
    chunks = -(-size // NORM_BLOCK)
    partials = torch.empty(count, chunks, dtype=torch.float64, device=batch.device)
    form = ("squares", is_aligned(batch), size % 16 == 0, chunks == 1, chunks % 16 == 0)
    constants = {"BLOCK": NORM_BLOCK}
    arguments = (batch, partials, size, chunks)
    launch(squares_kernel, count * chunks, arguments, constants, form, batch.device)
    norms = partials.sum(1).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return norms.reciprocal().to(torch.float32).view(count, 1, 1)


def can_copy_scaled(like: Tensor, elements: int) -> bool:
    """Whether `copy_scaled` takes tensors like this one, of at most so many elements each."""
    if not like.is_cuda or like.dtype is not torch.float32 or torch.compiler.is_compiling():
        return False
    return elements < 2**31 and can_run(like.device.index)


def copy_scaled(source: Tensor, out: Tensor, factors: Tensor | float) -> None:
    """Write the matrices times their factors into `out`, in its dtype and layout.

    Args:
        source: matrices (a, b, m, n), with any strides.
        out: the same shape; float32, bfloat16 or float16.
        factors: one number, or a contiguous float32 tensor with one for each of the a·b matrices.
    """
    from neumann.optim.preconditioners.cuda.elementwise_kernels import scaled_copy_kernel

    outer, *sizes = source.shape
    given = factors if isinstance(factors, Tensor) else None
    numbers = (*sizes, *source.stride(), *out.stride())
    factor = 1.0 if isinstance(factors, Tensor) else float(factors)
    constants = {"TILE": TILE, "INTERPRETED": is_interpreted(scaled_copy_kernel)}
    aligned = map(is_aligned, (source, out, given))
    form = ("copy", source.dtype, out.dtype, given is None, *aligned, *numbers)
    programs = outer * sizes[0] * -(-sizes[1] // TILE) * -(-sizes[2] // TILE)
    if programs:
        arguments = (source, out, given, factor, *numbers)
        launch(scaled_copy_kernel, programs, arguments, constants, form, out.device)


def _launch(name: str, tensors: list[Tensor], written: Tensor, numbers: tuple[float, ...]) -> None:
    """The kernel of this name over all elements; `written` is the state among the tensors."""
    from neumann.optim.preconditioners.cuda import elementwise_kernels

    size = written.numel()
    form = (name, size % 16 == 0, size < 2**31, *map(is_aligned, tensors))
    arguments = (*tensors, size, *map(float, numbers))
    kernel = getattr(elementwise_kernels, name)
    launch(kernel, -(-size // BLOCK), arguments, {"BLOCK": BLOCK}, form, written.device)
    increment_version(written)


def _is_flat(tensors: Sequence[Tensor]) -> bool:
    """Whether all are in float32, dense and in the same order, so that elements match in memory."""
    first = tensors[0]
    shape, stride = first.shape, first.stride()
    return (first.is_contiguous() or is_dense(shape, stride)) and all(
        t.dtype is torch.float32
        and t.shape == shape
        and t.stride() == stride
        and not t.is_neg()  # lazily negated: its memory holds −t
        for t in tensors
    )
