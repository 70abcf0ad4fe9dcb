"""α·XYᵀ + β·D for batches of matrices in half precision, where it is symmetric: half the work.

It is symmetric if Y is X, or if X and Y are symmetric matrices that commute. So the kernel computes
the tiles on and below the diagonal and mirrors them. With t tiles along a side that is (t + 1)/2t
of the products. Sums are in float32 and rounded once, as in torch.baddbmm.

The host never waits, and nothing depends on values, so a CUDA graph can capture the launch. The
first product of a shape compiles the kernel: take a step before a capture, as for any graph. A
tracer (torch.compile) gets the general product, and so do CPUs, ROCm, GPUs without bfloat16
products, and machines where Triton is missing or cannot compile.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neumann.caller_warnings import warn_caller
from neumann.optim.preconditioners.cuda.launch import is_aligned, launch
from neumann.optim.triton_runtime import is_interpreted

# Where the kernel runs: on these dtypes, from these sizes on. Smaller products do not fill the
# device, or spend too much on the tiles on the diagonal, which are computed whole. These sizes and
# the tilings below were the fastest on an H200 (results/symmetric-product-h200.json).
DTYPES = (torch.bfloat16, torch.float16)
LEAST_ROWS = 768
LEAST_RESULTS = 2048**2  # elements of the result, over the whole batch
CAPABILITY = (8, 0)  # the first GPUs that multiply bfloat16
ALIGNMENT = 16  # rows and columns: others are read too few bytes at a time


@dataclass(frozen=True)
class Tiling:
    """How a product is divided among programs."""

    tile: int  # side of a tile of the result
    depth: int  # columns that are multiplied at a time
    band: int  # rows of tiles that are visited together
    warps: int
    stages: int  # of the pipeline that loads X and Y


# Two programs of a Hopper GPU share a multiprocessor: each has 96 KB of X and Y, and 128
# accumulators a thread.
LARGE = Tiling(tile=128, depth=64, band=8, warps=8, stages=3)
LARGE_DEEP = Tiling(tile=128, depth=64, band=8, warps=8, stages=4)  # for products that take longer
SMALL = Tiling(tile=64, depth=64, band=8, warps=4, stages=3)
FILLS_DEVICE = 264  # programs, two for each multiprocessor; fewer large tiles leave some idle
DEEP_COLUMNS = 4096


def is_faster(x: Tensor) -> bool:
    """Whether the kernel can multiply such a batch by its transpose, and is likely to be faster."""
    if not x.is_cuda:
        return False
    batches, rows, columns = x.shape
    if rows < LEAST_ROWS or batches * rows * rows < LEAST_RESULTS:
        return False
    if rows % ALIGNMENT or columns % ALIGNMENT or rows * columns >= 2**31:
        return False
    return not torch.compiler.is_compiling() and can_run(x.device.index)


def multiply_by_transpose(
    x: Tensor,
    y: Tensor | None = None,
    *,
    alpha: float = 1.0,
    addend: Tensor | None = None,
    beta: float = 1.0,
    tiling: Tiling | None = None,
) -> Tensor:
    """α·XYᵀ + β·D of each matrix of a batch, by its lower triangle.

    Args:
        x: matrices (b, m, n) in bfloat16 or float16, with any strides.
        y: matrices of the same shape and dtype, for which XYᵀ is symmetric; None is X.
        alpha: the factor of the product.
        addend: D, matrices (b, m, m) of the same dtype. They must be symmetric: only their lower
            triangles are read.
        beta: the factor of D.
        tiling: None chooses one by size.

    Returns:
        A contiguous batch (b, m, m), symmetric bit for bit.
    """
    batches, rows, columns = x.shape
    y = x if y is None else y
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be of {' or '.join(map(str, DTYPES))}, got {x.dtype}")
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            f"y must be of shape {tuple(x.shape)} and {x.dtype}, got {tuple(y.shape)} and {y.dtype}"
        )
    if addend is not None and (addend.shape != (batches, rows, rows) or addend.dtype != x.dtype):
        raise ValueError(
            f"addend must be of shape {(batches, rows, rows)} and {x.dtype}, got "
            f"{tuple(addend.shape)} and {addend.dtype}"
        )
    tiling = tiling or choose_tiling(x, addend is not None)
    out = x.new_empty(batches, rows, rows)
    programs = batches * count_tiles(rows, tiling.tile)
    if not programs:
        return out
    arguments = (
        x,
        y,
        addend,
        out,
        rows,
        columns,
        *x.stride(),
        *y.stride(),
        *((0, 0, 0) if addend is None else addend.stride()),
        float(alpha),
        float(beta),
    )
    _launch(programs, arguments, tiling)
    return out


def count_tiles(rows: int, tile: int) -> int:
    """The tiles of a symmetric matrix on and below its diagonal."""
    side = -(-rows // tile)
    return side * (side + 1) // 2


def choose_tiling(x: Tensor, has_addend: bool) -> Tiling:
    """Large tiles need less traffic; small ones keep more of the device busy."""
    batches, rows, columns = x.shape
    if batches * count_tiles(rows, LARGE.tile) < FILLS_DEVICE:
        return SMALL
    return LARGE_DEEP if has_addend or columns >= DEEP_COLUMNS else LARGE


def _launch(programs: int, arguments: tuple[Any, ...], tiling: Tiling) -> None:
    kernel = _import_kernel()
    x, y, addend, out, *numbers = arguments
    constants = {
        "TILE": tiling.tile,
        "DEPTH": tiling.depth,
        "BAND": tiling.band,
        "EVEN": x.shape[2] % tiling.depth == 0,
        "INTERPRETED": is_interpreted(kernel),
    }
    aligned = map(is_aligned, (x, y, addend, out))
    form = ("symmetric", x.dtype, tiling, addend is None, *aligned, *numbers[:-2])
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    launch(kernel, programs, arguments, constants, form, x.device, **options)


@functools.cache
def can_run(device: int) -> bool:
    """Whether this GPU and this installation can run the kernels of this folder.

    Triton builds its launcher with a C compiler, which a machine may lack. Then a warning says so.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    try:
        if is_interpreted(_import_kernel()):
            return False
    except ImportError:
        return False
    try:
        multiply_by_transpose(torch.zeros(1, 64, 64, dtype=torch.bfloat16, device=device))
    except Exception as error:  # whatever the compiler raises
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        warn_caller(
            f"Triton cannot compile here ({reason}), so the spectral preconditioner multiplies "
            "large matrices with torch, which is slower",
        )
        return False
    return True


def _import_kernel() -> Any:
    """Imported on first use: the package works without Triton."""
    from neumann.optim.preconditioners.cuda.symmetric_kernel import symmetric_kernel

    return symmetric_kernel
