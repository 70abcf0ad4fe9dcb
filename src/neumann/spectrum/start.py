"""Random vectors for Lanczos: drawn on the CPU, so that a seed means the same on every device.

The bounds hold for a start that knows nothing of the matrix. A user's weights and data are often
drawn with small seeds, 0 above all, and a start from the same stream would be those very numbers.
So the seed is mixed with a word of ours by a hash, and the stream is one that nobody else uses.
"""

import hashlib

import torch
from torch import Tensor


def random_unit(
    size: int, seed: int, dtype: torch.dtype, device: torch.device, draw: int = 0
) -> Tensor:
    """A vector of length 1, all directions equally likely; another for each `draw` of a seed."""
    generator = torch.Generator().manual_seed(_stream(seed, draw))
    vector = torch.randn(size, generator=generator, dtype=dtype)
    # Added up in float64: in float32 a million squares miss the length by 3e-5.
    return vector.div_(torch.linalg.vector_norm(vector, dtype=torch.float64)).to(device)


def _stream(seed: int, draw: int) -> int:
    """The seed of a stream of our own; 32 bits, as torch's generator uses no more."""
    digest = hashlib.sha256(f"neumann.spectrum {int(seed)} {draw}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
