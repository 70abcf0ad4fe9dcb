"""Tables of addresses for the CPU kernel, and the threads that work through them.

A table holds the tensors of one combination of dtypes: the addresses of w, g, m and δ, the sizes,
and the blocks into which all of them are cut. Threads take chunks of blocks off a shared counter. A
block depends on nothing outside it, and the blocks' sums of squares are added in a fixed order, so
the result does not depend on the number of threads.

These are Python threads: the machine code runs without the interpreter's lock. Unlike numba's own
threads they can serve two optimizers at once, leave numba's settings alone, and start again in a
forked process. This module needs numba, so `numba_pass` imports it on first use.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neumann.optim.backends.cpu import numba_kernel
from neumann.optim.backends.cpu.compile_lock import take_turn
from neumann.optim.backends.cpu.numba_kernel import BLOCK, CHUNK
from neumann.optim.phases import Coefficients

# An empty array of each dtype tells numba what an address points to; bfloat16 is passed as bits.
SAMPLES: dict[torch.dtype, NDArray[Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.bfloat16: np.empty(0, np.uint16),
}


class Table:
    """Tensors that share their dtypes; `members` are their indices in the caller's lists.

    An entry is w, g, m and, if it is kept, δ, all of one size and memory order. The caller makes
    sure of that and keeps the tensors alive.
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
        """Point to new gradients, given by their addresses in the order of the members."""
        self._addresses[1] = addresses

    def prepare(self, coefficients: Coefficients, seed: int | None) -> Callable[[], float]:
        """Get the machine code of an update ready.

        `seed` is for stochastic rounding of bfloat16 state; None rounds to nearest. The result
        updates every tensor, and returns Σδ² of the new δ, 0.0 where it is not kept.
        """
        w, g, m, *rest = (SAMPLES[dtype] for dtype in self._dtypes)
        offset = rest[0] if rest else None
        number = np.float64 if torch.float64 in self._dtypes else np.float32

        def term(coefficient: float) -> Any:
            """A coefficient of a term; None drops the term."""
            return number(coefficient) or None

        def factor(coefficient: float) -> Any:
            """A factor; None leaves the number as it is."""
            return None if coefficient == 1 else number(coefficient)

        iterates = touches_iterate(coefficients)
        with np.errstate(over="ignore"):  # a force too large for float32 is infinite there
            terms = (
                factor(coefficients.scale),
                term(coefficients.weight_decay),
                None if offset is None else term(coefficients.force),
                term(coefficients.keep) if iterates else None,
                term(-coefficients.gain),
                term(coefficients.carry),
                term(-coefficients.push),
                term(-coefficients.shrink),
                None if offset is None else factor(coefficients.follow),
            )
        narrow = torch.bfloat16 in self._dtypes[2:]
        arguments = (
            self._addresses,
            self._sizes,
            self._positions,
            self._owners,
            self._starts,
            self._squares,
            (w, g, m if iterates else None, offset),
            terms,
            None if seed is None or not narrow else np.uint64(seed % 2**64),
        )
        _compile(arguments)

        def update() -> float:
            _run_on_threads(arguments, int(self._sizes.sum()))
            return float(self._squares.sum())

        return update


def touches_iterate(coefficients: Coefficients) -> bool:
    """Whether m is read or written at all: not in the warm-up."""
    return not (coefficients.keep == 1 and coefficients.gain == 0 and coefficients.carry == 0)


def _run_on_threads(arguments: tuple[Any, ...], elements: int) -> None:
    """Run the kernel on as many threads as torch uses, or fewer if there is little to do."""
    counter = np.zeros(1, np.int64)
    helpers = [
        _pool(os.getpid()).submit(numba_kernel.run, counter, *arguments)
        for _ in range(min(torch.get_num_threads() - 1, elements // (CHUNK * BLOCK)))
    ]
    try:
        numba_kernel.run(counter, *arguments)
    finally:  # no thread may still be writing when the tensors are freed
        started = [helper for helper in helpers if not helper.cancel()]
        wait(started)
    for helper in started:
        helper.result()


def _compile(arguments: tuple[Any, ...]) -> None:
    """Compile or load the machine code for these types, one process at a time."""
    *_, samples, terms, seed = arguments
    form = tuple(None if a is None else a.dtype for a in (*samples, *terms, seed))
    if form in _compiled:
        return
    finished = np.full(1, len(arguments[3]), np.int64)  # no block is left to work on
    with take_turn() as has_turn:
        if not has_turn:
            numba_kernel.stop_caching()
        try:
            numba_kernel.run(finished, *arguments)
        except OSError:  # the cache cannot be read or written: a full disk, for example
            numba_kernel.stop_caching()
            numba_kernel.run(finished, *arguments)
    _compiled.add(form)


_compiled: set[tuple[Any, ...]] = set()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process, started on first use; a forked process starts its own."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="neumann")
