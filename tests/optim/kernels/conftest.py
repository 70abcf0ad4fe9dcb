"""Every test has the same random numbers, and leaves torch as many threads as it had."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _afresh():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
