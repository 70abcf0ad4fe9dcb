"""Set up for every test: Triton, the markers, shared process groups, a clean compiler."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.process_group import ProcessGroup

TESTS = Path(__file__).parent

# Compiled CPU kernels are shared by all processes of a run, and kept for the next run.
os.environ.setdefault("NUMBA_CACHE_DIR", str(TESTS.parent / ".cache" / "numba"))

# Triton reads this when it is imported. Without a GPU it has to interpret its kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without job control starts background jobs with SIGINT ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the markers that follow from what a test uses.

    distributed: every test that uses the process groups `two` or `four`.
    slow: every test of the CUDA backend without a GPU, because Triton interprets its kernels.
    gpu: skipped without a GPU. With one, the tests of the CUDA backend belong to it as well, since
    their kernels then run on the device instead of being interpreted.
    """
    has_gpu = torch.cuda.is_available()
    for item in items:
        if {"two", "four"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.distributed)
        uses_cuda = "cuda" in item.path.relative_to(TESTS).as_posix()
        if has_gpu:
            if uses_cuda:
                item.add_marker(pytest.mark.gpu)
            # Elsewhere warnings are errors, but on a GPU torch warns about its own code.
            item.add_marker(pytest.mark.filterwarnings("default"))
        else:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if uses_cuda or parameters.get("implementation") == "triton":
                item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pool(size: int) -> Iterator[ProcessGroup]:
    ranks = ProcessGroup(size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[ProcessGroup]:
    """A process group of two, started once and shared by all tests."""
    yield from pool(2)


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessGroup]:
    """A process group of four, started once and shared by all tests."""
    yield from pool(4)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Drop the compiled graphs of other tests before this one, and of this one after it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
