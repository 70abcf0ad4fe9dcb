"""The Triton kernel of a symmetric α·XYᵀ + β·D: the lower triangle, and its mirror image.

A program computes one tile of one matrix of a batch and stores it twice, the second time transposed
on the other side of the diagonal. There are no programs for the tiles above the diagonal. Tiles are
visited in bands of rows and down the columns of a band, so that programs that run at the same time
read the same rows of X and Y and find them in the L2 cache:

    1                    bands of 2 rows of tiles
    2  3
    4  6  8
    5  7  9 10

The lower triangle decides: of D too, and inside the tiles on the diagonal. So the result is
symmetric bit for bit.
"""

# Triton reads the annotations of these functions; they are not Python's.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _find_in_triangle(index):
    """Row and column of an element of a lower triangle, counted row by row."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded, and may be the neighbor's.
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def _find_tile(index, tiles, BAND: tl.constexpr):
    """Row and column of a program's tile, in the order of the bands."""
    row, _ = _find_in_triangle(index)
    first = row // BAND * BAND  # row of the band
    height = tl.minimum(BAND, tiles - first)
    inside = index - first * (first + 1) // 2
    below, across = _find_in_triangle(tl.maximum(inside - first * height, 0))
    in_square = inside < first * height  # left of the triangle with which a band ends
    row = first + tl.where(in_square, inside % height, below)
    column = tl.where(in_square, inside // height, first + across)
    return row, column


@triton.jit
def widen(values):
    """bfloat16 to float32, as integers: the interpreter multiplies the bits of bfloat16."""
    if values.dtype.is_bf16():
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(
            tl.float32, bitcast=True
        )
    return values


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """To a narrow dtype, rounded to nearest; the interpreter's own cast truncates to bfloat16."""
    if dtype == tl.float16:
        return values.to(tl.float16)
    bits = values.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    rounded = tl.where(values == values, rounded, bits | 0x400000)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def symmetric_kernel(
    x,  # (batches, rows, columns), any strides
    y,  # the same
    addend,  # D, symmetric: (batches, rows, rows), any strides; or None
    out,  # (batches, rows, rows), contiguous
    rows,
    columns,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    addend_batch,
    addend_row,
    addend_column,
    alpha,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,  # columns that are multiplied at a time
    BAND: tl.constexpr,
    EVEN: tl.constexpr,  # whether DEPTH divides the columns
    INTERPRETED: tl.constexpr,
):
    tiles = tl.cdiv(rows, TILE)
    pairs = tiles * (tiles + 1) // 2
    program = tl.program_id(0)
    batch = (program // pairs).to(tl.int64)
    tile_row, tile_column = _find_tile(program % pairs, tiles, BAND)
    down = tile_row * TILE + tl.arange(0, TILE)
    across = tile_column * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    # Rows past the end read other rows instead; nothing of theirs is stored.
    x += batch * x_batch
    y += batch * y_batch
    left_at = x + (down % rows)[:, None] * x_row + depth[None, :] * x_column
    right_at = y + (across % rows)[None, :] * y_row + depth[:, None] * y_column
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, columns, DEPTH):
        if EVEN:
            left = tl.load(left_at)
            right = tl.load(right_at)
        else:
            left = tl.load(left_at, mask=depth[None, :] < columns - start, other=0.0)
            right = tl.load(right_at, mask=depth[:, None] < columns - start, other=0.0)
        if INTERPRETED:
            left = widen(left)
            right = widen(right)
        total = tl.dot(left, right, total)
        left_at += DEPTH * x_column
        right_at += DEPTH * y_column
    total *= alpha
    here = (down < rows)[:, None] & (across < rows)[None, :]
    if addend is not None:
        addend += batch * addend_batch
        addend_at = addend + down[:, None] * addend_row + across[None, :] * addend_column
        values = tl.load(addend_at, mask=here, other=0.0)
        if INTERPRETED:
            values = widen(values)
        total += beta * values.to(tl.float32)
    if tile_row == tile_column:
        total = tl.where(down[:, None] >= across[None, :], total, tl.trans(total))
    dtype: tl.constexpr = out.dtype.element_ty
    result = narrow(total, dtype) if INTERPRETED else total.to(dtype)
    out += batch * rows * rows
    tl.store(out + down[:, None] * rows + across[None, :], result, mask=here)
    if tile_row != tile_column:
        mirrored = (across < rows)[:, None] & (down < rows)[None, :]
        tl.store(out + across[:, None] * rows + down[None, :], tl.trans(result), mask=mirrored)
