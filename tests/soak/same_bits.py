"""Whether two results agree to the last bit."""

from typing import Any

import torch
from torch import Tensor


def same_bits(a: Any, b: Any) -> bool:
    """Compare tensors, numbers, and containers of any depth; NaN equals itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)
