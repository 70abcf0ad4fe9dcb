"""α·XXᵀ + β·D for batches of bfloat16 matrices: half the operations of a general product.

The result is symmetric, so the kernel computes the tiles on and below the diagonal and mirrors
them. With t tiles along a side that is (t + 1)/2t of the products. Sums are in float32 and rounded
once, as in torch.baddbmm.

The host never waits, and nothing depends on values, so a CUDA graph can capture the launch. The
first product of a shape compiles the kernel: take a step before a capture, as for any graph. A
tracer (torch.compile) gets the general product, and so do CPUs, ROCm, GPUs without bfloat16
products, and machines where Triton is missing or cannot compile.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from neumann.caller_warnings import warn_caller

# Where the kernel runs: from these sizes on. Smaller products do not fill the device, or spend too
# much on the tiles on the diagonal, which are computed whole. These sizes and the tilings below
# were the fastest on an H200 (results/symmetric-product-h200.json).
LEAST_ROWS = 768
LEAST_RESULTS = 2048**2  # elements of the result, over the whole batch
CAPABILITY = (8, 0)  # the first GPUs that multiply bfloat16
ALIGNMENT = 16  # rows and columns: others are read too few bytes at a time


@dataclass(frozen=True)
class Tiling:
    """How a product is divided among programs."""

    tile: int  # side of a tile of the result
    depth: int  # columns of X that are multiplied at a time
    band: int  # rows of tiles that are visited together
    warps: int
    stages: int  # of the pipeline that loads X


# Two programs of a Hopper GPU share a multiprocessor: 96 KB of X each, 128 accumulators a thread.
LARGE = Tiling(tile=128, depth=64, band=8, warps=8, stages=3)
LARGE_DEEP = Tiling(tile=128, depth=64, band=8, warps=8, stages=4)  # for products that take longer
SMALL = Tiling(tile=64, depth=64, band=8, warps=4, stages=3)
FILLS_DEVICE = 264  # programs, two for each multiprocessor; fewer large tiles leave some idle
DEEP_COLUMNS = 4096

# The compiled kernel and its constants, by everything that Triton compiles for.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def is_faster(x: Tensor) -> bool:
    """Whether the kernel can multiply this batch by its transpose, and is likely to be faster."""
    if not x.is_cuda or x.dtype is not torch.bfloat16:
        return False
    batches, rows, columns = x.shape
    if rows < LEAST_ROWS or batches * rows * rows < LEAST_RESULTS:
        return False
    if rows % ALIGNMENT or columns % ALIGNMENT or rows * columns >= 2**31:
        return False
    return not torch.compiler.is_compiling() and _can_run(x.device.index)


def multiply_by_transpose(
    x: Tensor,
    *,
    alpha: float = 1.0,
    addend: Tensor | None = None,
    beta: float = 1.0,
    tiling: Tiling | None = None,
) -> Tensor:
    """α·XXᵀ + β·D of each matrix of a batch.

    Args:
        x: bfloat16 matrices (b, m, n), with any strides.
        alpha: the factor of the product.
        addend: D, bfloat16 matrices (b, m, m). They must be symmetric: only their lower triangles
            are read.
        beta: the factor of D.
        tiling: None chooses one by size.

    Returns:
        A contiguous batch (b, m, m), symmetric bit for bit.
    """
    batches, rows, columns = x.shape
    if x.dtype is not torch.bfloat16:
        raise ValueError(f"x must be of torch.bfloat16, got {x.dtype}")
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
        addend,
        out,
        rows,
        columns,
        *x.stride(),
        *((0, 0, 0) if addend is None else addend.stride()),
        float(alpha),
        float(beta),
    )
    device = x.device
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            _launch(programs, arguments, tiling)
    else:
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
    """Launch the kernel, compiled now unless such arguments have been seen before.

    What Triton compiled is launched directly: Triton would inspect every argument again, which
    takes longer than all other Python of a product.
    """
    kernels = _import_kernels()
    x, addend, out, *numbers = arguments
    constants = {
        "TILE": tiling.tile,
        "DEPTH": tiling.depth,
        "BAND": tiling.band,
        "EVEN": x.shape[2] % tiling.depth == 0,
        "INTERPRETED": is_interpreted(kernels),
    }
    kernel = kernels.symmetric_kernel
    if constants["INTERPRETED"]:
        kernel[(programs,)](*arguments, **constants)
        return
    pointers = (t is not None and t.data_ptr() % 16 == 0 for t in (x, addend, out))
    form = (x.device, tiling, addend is None, *pointers, *numbers[:-2])
    known = _compiled.get(form)
    if known is None:
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        compiled = kernel[(0,)](*arguments, **constants, **options)  # without programs nothing runs
        known = _compiled[form] = (compiled, tuple(constants.values()))
    compiled, values = known
    compiled[(programs, 1, 1)](*arguments, *values)


@functools.cache
def _can_run(device: int) -> bool:
    """Whether this GPU and this installation can run the kernel.

    Triton builds its launcher with a C compiler, which a machine may lack. Then a warning says so.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    try:
        if is_interpreted(_import_kernels()):
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


def is_interpreted(kernels: ModuleType) -> bool:
    return not isinstance(kernels.symmetric_kernel, kernels.triton.runtime.JITFunction)


def _import_kernels() -> ModuleType:
    """Imported on first use: the package works without Triton."""
    from neumann.optim.preconditioners.cuda import symmetric_kernel

    return symmetric_kernel
