"""Random vectors for Lanczos: drawn on the CPU, so that a seed means the same on every device."""

import torch
from torch import Tensor


def random_unit(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of length 1, all directions equally likely."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=generator, dtype=dtype).to(device)
    return vector.div_(torch.linalg.vector_norm(vector))
