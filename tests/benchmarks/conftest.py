"""A contest that several tests read."""

import pytest

from tests.support.language_scores import invent, run_stages


@pytest.fixture(scope="session")
def contest(tmp_path_factory):
    """The language contest after all its stages, on invented losses."""
    return run_stages(tmp_path_factory.mktemp("contest"), invent)
