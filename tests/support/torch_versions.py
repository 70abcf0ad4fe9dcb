"""Marks for tests of what older versions of torch do not have."""

import pytest
import torch

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9"
)
