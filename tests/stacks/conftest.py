"""Two and four processes, shared by all checks of a test run that need them."""

from collections.abc import Iterator

import pytest

from ranks import Ranks


def pool(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    yield from pool(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    yield from pool(4)
