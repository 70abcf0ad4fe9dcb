"""Arithmetic in the full precision of its dtype, for as long as a measurement takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Convolutions and products of matrices in full float32: TF32 rounds to 10 bits."""
    if device.type != "cuda":
        yield
        return
    convolutions, matrices = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, matrices.allow_tf32
    convolutions.allow_tf32 = matrices.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, matrices.allow_tf32 = before
