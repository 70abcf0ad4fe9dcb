"""The Triton kernels of P's elementwise arithmetic: each reads and writes every element once."""

# Triton reads the annotations of these functions; they are not Python's.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from neumann.optim.preconditioners.cuda.symmetric_kernel import narrow, widen


@triton.jit
def momentum_kernel(gradients, past, out, size, decay, BLOCK: tl.constexpr):
    """b ← decay·b + g, and g + decay·b."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    gradient = tl.load(gradients + at, mask=here)
    momentum = decay * tl.load(past + at, mask=here) + gradient
    tl.store(past + at, momentum, mask=here)
    tl.store(out + at, gradient + decay * momentum, mask=here)


@triton.jit
def diagonal_kernel(
    gradients,
    squares,
    correction,  # √(1 − decayⁿ)
    out,
    size,
    decay,
    gain,  # 1 − decay
    eps,
    scale,
    BLOCK: tl.constexpr,
):
    """v ← decay·v + (1 − decay)·g², and scale·g / (√v/correction + ε)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    gradient = tl.load(gradients + at, mask=here)
    square = decay * tl.load(squares + at, mask=here) + gain * gradient * gradient
    tl.store(squares + at, square, mask=here)
    root = tl.sqrt_rn(square) / tl.load(correction) + eps
    tl.store(out + at, scale * tl.div_rn(gradient, root), mask=here)


@triton.jit
def scaled_copy_kernel(
    source,  # (outer, count, rows, columns), any strides
    out,  # the same
    factors,  # of each matrix; or None
    factor,  # of all, if there are no factors
    count,
    rows,
    columns,
    source_outer,
    source_count,
    source_row,
    source_column,
    out_outer,
    out_count,
    out_row,
    out_column,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Matrices times factors, in another dtype and another layout.

    A program copies one tile. Triton reads along the rows or the columns of a tile, whichever is
    sequential in memory, and turns it on the chip if it is the other one for writing.
    """
    across = tl.cdiv(columns, TILE)
    tiles = tl.cdiv(rows, TILE) * across
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = (tile // across * TILE + tl.arange(0, TILE))[:, None]
    column = (tile % across * TILE + tl.arange(0, TILE))[None, :]
    here = (row < rows) & (column < columns)
    outer = matrix // count
    inner = matrix % count
    source += outer * source_outer + inner * source_count
    out += outer * out_outer + inner * out_count
    values = tl.load(source + row * source_row + column * source_column, mask=here)
    if INTERPRETED:
        values = widen(values)
    if factors is not None:
        factor = tl.load(factors + matrix)
    values = values.to(tl.float32) * factor
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype != tl.float32:
        values = narrow(values, dtype) if INTERPRETED else values.to(dtype)
    tl.store(out + row * out_row + column * out_column, values, mask=here)


@triton.jit
def squares_kernel(batch, partials, size, chunks, BLOCK: tl.constexpr):
    """The sum of squares of each chunk of each matrix, in float64."""
    program = tl.program_id(0)
    at = program % chunks * BLOCK + tl.arange(0, BLOCK)
    matrix = batch + (program // chunks).to(tl.int64) * size
    values = tl.load(matrix + at, mask=at < size, other=0.0).to(tl.float64)
    tl.store(partials + program, tl.sum(values * values))
