"""Random generators continue with the numbers that would have come next."""

import random

import numpy as np
import pytest
import torch

from neumann.lab.training.random_state import get_rng_state, set_rng_state


def test_random_generators_continue_where_they_were():
    def draw():
        return (random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(3).tolist())  # noqa: NPY002

    draw()
    state = get_rng_state()
    expected = draw()
    draw()
    set_rng_state(state)
    assert draw() == expected
    with pytest.raises(ValueError, match="has no 'cuda', 'torch'"):
        set_rng_state({"python": 0, "numpy": 0})
