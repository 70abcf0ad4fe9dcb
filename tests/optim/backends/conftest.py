"""Every test starts with the same seed and restores torch's number of threads."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
