"""What every test finds: Triton set up, processes to train together, a compiler afresh."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from ranks import Ranks

# Triton decides when it is imported whether it interprets; without a GPU it has to.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without job control starts what runs in the background deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are errors where there is no GPU. With one torch warns of parts of its own."""
    if torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pool(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes, shared by all checks of a test run that need them."""
    yield from pool(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four of them."""
    yield from pool(4)


@pytest.fixture
def compiler_afresh() -> Iterator[None]:
    """Without the graphs of other tests, and with none left to them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
