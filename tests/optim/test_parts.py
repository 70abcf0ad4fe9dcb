"""Each part of the algorithm on its own, in every implementation."""

import pytest

from neumann import Neumann
from parts import PARTS
from runs import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("part", PARTS)
def test_part(part, implementation):
    PARTS[part](Neumann, **IMPLEMENTATIONS[implementation])
