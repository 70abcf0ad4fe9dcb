"""The stream on which CUDA graphs are captured."""

from functools import cache

import torch


@cache
def find_capture_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs of a device: torch keeps memory for products on every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
