"""Orthogonalization: the orthogonal matrix UVᵀ nearest to G = UΣVᵀ, for many matrices at once.

A Newton–Schulz iteration needs matrix products alone:

    X ← (aI + bA + cA²)X        A = XXᵀ, X₀ = G/‖G‖

With the coefficients of Jordan and others (2024) five iterations take singular values from far
below 1 to between 0.7 and 1.2. It runs in bfloat16 on CUDA and in float32 elsewhere. A and bA + cA²
are symmetric; of large ones only half is computed (`cuda.symmetric_product`).

A large matrix that is much wider than tall is faster in the form of Gram matrices: with
P = aI + bA + cA² the next A is P²A, so the iteration needs X only at its end. Rounding errors in A
grow from one iteration to the next where A is nearly singular. So after three of them X ← QX, with
the product Q of their P, and A = XXᵀ is computed anew. This runs in float16, which rounds eight
times as finely as bfloat16; no number leaves its range, since X has a norm of at most 1.

A matrix with more rows than columns is transposed first ("wide" below means: no more rows than
columns). Matrices of equal shape form one batch. On CUDA smaller ones may join them, padded with
zeros.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neumann.optim.preconditioners.cuda.symmetric_product import is_faster, multiply_by_transpose
from neumann.optim.preconditioners.matrix_view import WHOLE, MatrixView

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RESTART = 3  # iterations of the Gram form after which A is computed anew
GRAM_COLUMNS = 2  # columns per row from which on the Gram form is faster


def is_matrix(tensor: Tensor) -> bool:
    """Whether the tensor counts as a matrix: more than one row and more than one column."""
    if tensor.ndim < 2 or tensor.is_complex():
        return False
    rows = tensor.shape[0]
    return rows > 1 and tensor.numel() > rows


def count_operations(rows: int, columns: int) -> int:
    """The operations of a matrix with sides m ≤ n: 20m²n + 10m³, or 8m²n + 28m³ from n = 2m on.

    Each iteration makes three products: XXᵀ and (bA + cA²)X of 2m²n operations, A² of 2m³. The Gram
    form makes four of 2m²n and fourteen of 2m³. Symmetric products count in full, and all matrices
    as if they were large: which products are halved, and the form, depend on the device and
    the batch, and all processes must find the same count.
    """
    m, n = sorted((rows, columns))
    if n >= GRAM_COLUMNS * m:
        return 8 * m**2 * n + 28 * m**3
    return ITERATIONS * (4 * m**2 * n + 2 * m**3)


def orthogonalize(wide: Tensor) -> Tensor:
    """UVᵀ of each matrix of a batch (b, m, n) with m ≤ n, in its dtype; zero stays zero."""
    result: Tensor = iterate(normalize(wide)).to(wide.dtype)
    return result


def normalize(wide: Tensor, *, overwrite: bool = False) -> Tensor:
    """The batch with norms of at most 1, in the dtype of the iteration.

    With `overwrite` the batch is used as working memory.
    """
    dtype = choose_dtype(wide)
    largest = torch.linalg.vector_norm(wide, math.inf, (1, 2), keepdim=True)
    largest = largest.clamp(min=torch.finfo(wide.dtype).tiny)  # so that squares do not overflow
    x = wide.div_(largest) if overwrite else wide / largest
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1)
    narrow: Tensor = x.to(dtype)
    return narrow


def choose_dtype(wide: Tensor) -> torch.dtype:
    """The dtype of the iteration: float16 says that it takes the Gram form."""
    if not wide.is_cuda:
        return torch.float32
    _, rows, columns = wide.shape
    gram = columns >= GRAM_COLUMNS * rows and is_faster(wide)
    return torch.float16 if gram else torch.bfloat16


def iterate(x: Tensor) -> Tensor:
    """The Newton–Schulz iteration of a batch whose matrices have a norm of at most 1."""
    if x.dtype is torch.float16:
        return iterate_gram(x)
    a, b, c = COEFFICIENTS
    symmetric = is_faster(x)
    for _ in range(ITERATIONS):
        if symmetric:
            gram = multiply_by_transpose(x)
            polynomial = multiply_by_transpose(gram, alpha=c, addend=gram, beta=b)
        else:
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # adds before it rounds
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def iterate_gram(x: Tensor) -> Tensor:
    """The same in the form of Gram matrices."""
    for iterations in (RESTART, ITERATIONS - RESTART):
        x = torch.bmm(multiply_polynomials(multiply_by_transpose(x), iterations), x)
    return x


def multiply_polynomials(gram: Tensor, iterations: int) -> Tensor:
    """Q, the product of the P of this many iterations, from A before them. All these commute."""
    a, b, c = COEFFICIENTS
    product = gram
    for number in range(iterations):
        polynomial = multiply_by_transpose(gram, alpha=c, addend=gram, beta=b)  # P − aI
        if number > 0:
            product = multiply_by_transpose(polynomial, product, addend=product, beta=a)
        if number + 1 < iterations:
            half = multiply_by_transpose(polynomial, gram, addend=gram, beta=a)  # PA
            gram = multiply_by_transpose(polynomial, half, addend=half, beta=a)
        if number == 0:
            polynomial.diagonal(dim1=1, dim2=2).add_(a)
            product = polynomial
    return product


def orthogonalize_many(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """UVᵀ of tensors seen as out × (in·kh·kw), with the shape and memory format of each."""
    matrices = {index: _as_wide(tensor).unsqueeze(0) for index, tensor in tensors.items()}
    results = orthogonalize_batches(matrices)
    return {i: _restore_layout(result.squeeze(0), tensors[i]) for i, result in results.items()}


def orthogonalize_batches(matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """UVᵀ of batches (b, m, n) of wide matrices, m ≤ n, for many shapes at once."""
    found: dict[int, Tensor] = {}
    for chosen in make_batches(matrices):
        counts = [len(matrices[i]) for i in chosen]
        results = torch.split(orthogonalize(_stack([matrices[i] for i in chosen])), counts)
        for i, result in zip(chosen, results, strict=True):
            rows, columns = matrices[i].shape[1:]
            found[i] = result[:, :rows, :columns]
    return found


def make_batches(matrices: Mapping[int, Tensor]) -> list[list[int]]:
    """Which batches (b, m, n) of wide matrices to process together; see `group_sizes`."""
    if not matrices:
        return []
    sizes = {index: (len(m), m.shape[1], m.shape[2]) for index, m in matrices.items()}
    return group_sizes(sizes, launch_cost(next(iter(matrices.values()))))


def group_sizes(sizes: Mapping[int, tuple[int, int, int]], launching: float) -> list[list[int]]:
    """Which batches of these sizes (b, m, n) to process together.

    Those of equal shape; on a GPU, where another batch costs `launching` operations, also smaller
    ones, padded with zeros, if that costs less than a batch of their own. There are never more
    zeros than numbers. `launching` goes with an estimate of 20m²n for a matrix, without 10m³.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, (_, rows, columns) in sizes.items():
        kinds.setdefault((rows, columns), []).append(index)
    counts = {kind: sum(sizes[i][0] for i in chosen) for kind, chosen in kinds.items()}
    allowed = sum(rows * columns * counts[rows, columns] for rows, columns in kinds)
    found: list[list[int]] = []
    height = width = there = 0  # of the last batch
    for (rows, columns), chosen in sorted(kinds.items(), reverse=True):
        new = counts[rows, columns]
        if found:
            wider = max(width, columns)
            zeros = height * (wider * (there + new) - width * there) - rows * columns * new
            work = height**2 * (wider * (there + new) - width * there) - rows**2 * columns * new
            if zeros <= allowed and 4 * ITERATIONS * work < launching:
                found[-1] += chosen
                width, allowed, there = wider, allowed - zeros, there + new
                continue
        found.append(list(chosen))
        height, width, there = rows, columns, new
    return found


def launch_cost(matrix: Tensor) -> float:
    """Operations that the device could do while the kernels of another batch are launched."""
    return 2e10 if matrix.is_cuda else 0.0


def split_wide(tensor: Tensor, view: MatrixView) -> tuple[list[Tensor], list[torch.Size]]:
    """Batches (b, m, n) of the wide matrices in a tensor, and the shape (out, in, …) of each."""
    if view == WHOLE:
        return [_as_wide(tensor).unsqueeze(0)], [tensor.shape]
    split = view.split(tensor)
    flat = [batch.flatten(2) for batch in split]
    wide = [batch.mT if batch.shape[1] > batch.shape[2] else batch for batch in flat]
    return wide, [batch.shape[1:] for batch in split]


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """One batch. Rows and columns of zeros stay zeros and do not affect the others."""
    shapes = [matrix.shape for matrix in matrices]
    rows, columns = max(shape[1] for shape in shapes), max(shape[2] for shape in shapes)
    if all(shape[1:] == (rows, columns) for shape in shapes):
        return torch.cat(list(matrices))
    counts = [shape[0] for shape in shapes]
    stack = matrices[0].new_zeros(sum(counts), rows, columns)
    for place, matrix, shape in zip(torch.split(stack, counts), matrices, shapes, strict=True):
        place[:, : shape[1], : shape[2]].copy_(matrix)
    return stack


# ------------------------------------------------------------------ layout


def _as_wide(tensor: Tensor) -> Tensor:
    """The tensor as a matrix with no more rows than columns."""
    matrix = _rows_first(tensor).flatten(1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _rows_first(tensor: Tensor) -> Tensor:
    """The tensor with its other dimensions in memory order, so that rows are read sequentially.

    Another order of a matrix's columns only permutes the columns of UVᵀ.
    """
    return tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor


def _restore_layout(wide: Tensor, like: Tensor) -> Tensor:
    """A wide matrix in the shape and memory format of a tensor: a view or a copy."""
    matrix = wide if len(wide) == len(like) else wide.mT
    result = matrix.reshape(_rows_first(like).shape)
    if _is_channels_last(like):
        result = result.permute(0, 3, 1, 2)
    return result if result.stride() == like.stride() else torch.empty_like(like).copy_(result)


def _is_channels_last(tensor: Tensor) -> bool:
    """Also decided by strides, which for a 1 × 1 kernel may be those of either format."""
    if tensor.ndim != 4 or tensor.stride(-1) == 1:
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
