"""Tables of addresses for the CPU kernel, and the threads that work through them.

A table holds the tensors of one combination of dtypes: where w, g, m and δ of each begin, its size,
and the blocks that all of them are cut into. Threads take chunks of blocks off a shared counter as
they come free. What a block computes depends on nothing outside it and the blocks' sums of squares
are added in a fixed order, so the result does not depend on the threads.

The threads are Python's: the machine code runs without the interpreter's lock. Unlike numba's own
they may serve two optimizers at once, leave numba's settings alone, and start anew in a forked
process. This module needs numba, so `cpu` imports it when it is used.
"""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from neumann.optim.kernels import cpu_kernel
from neumann.optim.kernels.cpu_kernel import BLOCK, CHUNK
from neumann.optim.phases import Row

# An empty array of each dtype tells numba what lies at an address; bfloat16 is its bits.
SAMPLES: dict[torch.dtype, NDArray[Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.bfloat16: np.empty(0, np.uint16),
}


class Table:
    """Tensors that share their dtypes; `members` are their indices in the lists of the caller.

    The entries are aligned, w, g, m and, if it is kept, δ, of one length and order in memory. The
    caller vouches for that, and keeps the tensors alive.
    """

    def __init__(self, members: Sequence[int], entries: Sequence[tuple[Tensor, ...]]) -> None:
        self.members = members
        self._dtypes = [tensor.dtype for tensor in entries[0]]
        self._addresses = np.zeros((4, len(entries)), np.int64)
        for row, column in enumerate(zip(*entries, strict=True)):
            self._addresses[row] = [tensor.data_ptr() for tensor in column]
        self._sizes = np.array([entry[0].numel() for entry in entries], np.int64)
        # Far enough apart that no two elements of a step share a position.
        self._positions = np.array(members, np.int64) << 40
        blocks = -(-self._sizes // BLOCK)
        self._owners = np.repeat(np.arange(len(entries)), blocks)
        first = np.repeat(np.cumsum(blocks) - blocks, blocks)
        self._starts = (np.arange(len(self._owners)) - first) * BLOCK
        self._squares = np.zeros(len(self._owners))

    def set_gradients(self, addresses: Sequence[int]) -> None:
        """New gradients, by their addresses in the order of the members."""
        self._addresses[1] = addresses

    def run(
        self, row: Row, force: float, weight_decay: float, scale: float, seed: int | None
    ) -> float:
        """Update every tensor; returns Σδ² of the new δ, 0.0 where it is not kept."""
        w, g, m, *rest = (SAMPLES[dtype] for dtype in self._dtypes)
        offset = rest[0] if rest else None
        number = np.float64 if torch.float64 in self._dtypes else np.float32

        def term(coefficient: float) -> Any:
            """A coefficient as the arithmetic takes it; None drops a term of zero."""
            return number(coefficient) or None

        def factor(coefficient: float) -> Any:
            """The same for what is multiplied as a whole; None leaves it as it is."""
            return None if coefficient == 1 else number(coefficient)

        iterates = touches_iterate(row)
        with np.errstate(over="ignore"):  # a force too large for float32 is infinite there
            coefficients = (
                factor(scale),
                term(weight_decay),
                None if offset is None else term(force),
                term(row.keep) if iterates else None,
                term(-row.gain),
                term(row.carry),
                term(-row.push),
                term(-row.decay),
                None if offset is None else factor(row.follow),
            )
        narrow = torch.bfloat16 in self._dtypes[2:]
        arguments = (
            self._addresses,
            self._sizes,
            self._positions,
            self._owners,
            self._starts,
            self._squares,
            w,
            g,
            m if iterates else None,
            offset,
            *coefficients,
            None if seed is None or not narrow else np.uint64(seed % 2**64),
        )
        _share_out(arguments, int(self._sizes.sum()))
        return float(self._squares.sum())


def touches_iterate(row: Row) -> bool:
    """Whether m is read or written at all: not in the warm-up."""
    return not (row.keep == 1 and row.gain == 0 and row.carry == 0)


def _share_out(arguments: tuple[Any, ...], elements: int) -> None:
    """Run the kernel on as many threads as torch uses, fewer where there is little to do."""
    _make_ready(arguments)
    counter = np.zeros(1, np.int64)
    helpers = [
        _pool(os.getpid()).submit(cpu_kernel.run, counter, *arguments)
        for _ in range(min(torch.get_num_threads() - 1, elements // (CHUNK * BLOCK)))
    ]
    try:
        cpu_kernel.run(counter, *arguments)
    finally:  # whatever happens, nobody may still be writing when the tensors go
        started = [helper for helper in helpers if not helper.cancel()]
        wait(started)
    for helper in started:
        helper.result()


def _make_ready(arguments: tuple[Any, ...]) -> None:
    """Compile or load the machine code for such arguments, one process at a time.

    Two processes that write numba's cache at once can give two specialisations the same file, and
    whoever loads it then runs code for other dtypes.
    """
    form = tuple(None if a is None else a.dtype for a in arguments)
    if form in _ready:
        return
    user = getattr(os, "getuid", int)()  # a user may have no name, and Windows has no number
    lock = Path(tempfile.gettempdir()) / f"neumann-numba-{user}.lock"
    with FileLock(lock):
        finished = np.full(1, len(arguments[3]), np.int64)  # no block is left to do
        cpu_kernel.run(finished, *arguments)
    _ready.add(form)


_ready: set[tuple[Any, ...]] = set()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process, made when they are first asked for; a fork has none of them."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="neumann")
