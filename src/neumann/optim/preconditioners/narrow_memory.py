"""P's state in bfloat16: widened to float32 for P, and rounded stochastically after it.

Rounded to nearest, a momentum under steady gradients would stop short of its limit. The noise is a
hash of the step, which the device knows without the host, and of the element's place in its tensor.
So a resumed run has the same bits, and copies of a parameter on several processes stay equal
whatever else these hold. All tensors are handled together: one at a time would be launches for
each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from neumann.optim.precision import mix_bits, round_stochastically
from neumann.optim.strides import is_dense

PERIOD = 2**18  # elements after which a tensor gets the same noise again; a step makes no more


@dataclass
class WideMemory:
    """Float32 copies of tensors that are kept in bfloat16."""

    kept: list[Tensor]
    wide: list[Tensor]
    flat: Tensor | None  # the memory of `wide`, one tensor after the other; None in a traced step

    def write_back(self, clock: Tensor) -> None:
        """Round the copies, and write them into what is kept; `clock` differs in each step."""
        if self.flat is None:
            noises = [make_noise(clock, wide).reshape(wide.shape) for wide in self.wide]
            torch._foreach_copy_(self.kept, list(map(round_stochastically, self.wide, noises)))
            return
        # Noise would turn the largest NaN into 0. It leaves infinity, which P turns into NaN again.
        bits = self.flat.nan_to_num_(nan=inf, posinf=inf, neginf=-inf).view(torch.int32)
        tensors = torch.split(bits, [wide.numel() for wide in self.wide])
        pieces = [piece for tensor in tensors for piece in torch.split(tensor, PERIOD)]
        noise = make_noise(clock, max(pieces, key=len)).to(torch.int32)
        torch._foreach_add_(pieces, [noise[: len(piece)] for piece in pieces])
        bits.bitwise_and_(-(1 << 16))
        torch._foreach_copy_(self.kept, self.wide)


def widen(kept: Sequence[Tensor]) -> WideMemory:
    """Copies in float32, in the layout of the originals."""
    if torch.compiler.is_compiling():  # which makes few launches of its own
        return WideMemory(list(kept), [tensor.to(torch.float32) for tensor in kept], None)
    flat = torch.empty(
        sum(tensor.numel() for tensor in kept), dtype=torch.float32, device=kept[0].device
    )
    starts = accumulate((tensor.numel() for tensor in kept), initial=0)
    wide = [
        flat.as_strided(tensor.shape, _find_strides(tensor), start)
        for tensor, start in zip(kept, starts, strict=False)
    ]
    torch._foreach_copy_(wide, list(kept))
    return WideMemory(list(kept), wide, flat)


def make_noise(clock: Tensor, like: Tensor) -> Tensor:
    """16 bits for each element of a tensor: a function of the step and the element."""
    elements = torch.arange(like.numel(), device=like.device)
    return mix_bits((elements ^ (clock * 0x9E3779B9)) & 0xFFFFFFFF) & 0xFFFF


def _find_strides(tensor: Tensor) -> Sequence[int]:
    """Those of the tensor, or of a contiguous one if it has gaps."""
    strides = tensor.stride()
    if is_dense(tensor.shape, strides):
        return strides
    return torch.empty(tensor.shape, device="meta").stride()
