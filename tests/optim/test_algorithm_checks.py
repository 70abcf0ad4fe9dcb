"""Each part of the algorithm on its own, in every implementation."""

import pytest

from neumann import Neumann
from tests.support.algorithm_checks import PARTS
from tests.support.oracle_runs import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("part", PARTS)
def test_part(part, implementation):
    PARTS[part](Neumann, **IMPLEMENTATIONS[implementation])
