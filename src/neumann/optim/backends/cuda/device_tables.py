"""What the host sends to the kernels: options, reset times and the addresses of gradients.

Each is packed into bytes, 8 per number, and a `Mirror` keeps a copy of the bytes on the device. It
sends them again only when they changed, from pinned memory, and the host does not wait.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from neumann.optim.options import StepOptions
from neumann.optim.phases import Timetable, reset_table
from neumann.optim.tensors import Tensors


class Mirror:
    """Bytes of the host, mirrored by an int64 tensor on the device that is never overwritten.

    New contents make a new tensor, sent from pinned memory without waiting, so a captured graph
    keeps the tensor that it was captured with. Contents that first appear during a capture are sent
    again at each replay, from memory reserved for that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._contents: bytes | None = None
        self._tensor = torch.empty(0, dtype=torch.int64)
        self._reserve: Tensor | None = None
        self._captured: list[Tensor] = []

    def send(self, contents: bytes, capturing: bool = False) -> Tensor:
        """The tensor that holds these bytes (8 per element)."""
        if contents != self._contents:
            host = torch.frombuffer(bytearray(contents or bytes(8)), dtype=torch.int64)
            if capturing:
                source = self._pin(host)
                tensor = source.to(self._device, non_blocking=True)
                self._captured += [source, tensor]
                return tensor  # empty until the graph is replayed
            if self._device.type == "cuda":
                if self._reserve is None or self._reserve.shape != host.shape:
                    self._reserve = torch.empty_like(host, pin_memory=True)
                # torch does not reuse freed pinned memory before the copy has happened.
                host = torch.empty_like(host, pin_memory=True).copy_(host)
            self._tensor = host.to(self._device, non_blocking=True)
            self._contents = contents
        if capturing:
            self._captured.append(self._tensor)
        return self._tensor

    def _pin(self, host: Tensor) -> Tensor:
        """Pinned memory that stays; allocating it during a capture is not always allowed."""
        reserve, self._reserve = self._reserve, None
        if reserve is None or reserve.shape != host.shape:
            reserve = torch.empty_like(host, pin_memory=True)
        return reserve.copy_(host)


def pack_addresses(addresses: Sequence[int]) -> bytes:
    """The gradients' addresses, as the kernels read them."""
    return struct.pack(f"={len(addresses)}q", *addresses)


def pack_options(groups: Sequence[Tensors], options: StepOptions, device: torch.device) -> bytes:
    """A header and an entry for each group, as the kernels read them."""
    times, interval = pack_resets(options.timetable)
    parts = [
        struct.pack(
            "=4q4d",
            options.timetable.warmup_steps,
            interval,
            len(times) // 8,
            options.bounded,
            options.cubic,
            options.repulsive,
            options.average,
            0.0,
        )
    ]
    for group in groups:
        own = group.options
        decoupled = own["decoupled_weight_decay"]
        address, bits, lr = _locate_lr(own["lr"], device)
        parts.append(
            struct.pack(
                "=3q5d",
                address,
                bits,
                group.momentum.data_ptr(),
                lr,
                own["momentum"],
                0.0 if decoupled else own["weight_decay"],
                own["weight_decay"] if decoupled else 0.0,
                -1.0 if own["maximize"] else 1.0,
            )
        )
    return b"".join(parts)


@lru_cache(maxsize=64)
def pack_resets(timetable: Timetable) -> tuple[bytes, int]:
    """Reset times, and the interval at which they continue after the last (0: they do not)."""
    times, interval = reset_table(timetable.reset_steps, timetable.reset_growth)
    return struct.pack(f"={len(times)}q", *times), interval


def _locate_lr(lr: Any, device: torch.device) -> tuple[int, int, float]:
    """Address and width of a tensor on the device; or 0, 0 and the number."""
    if not isinstance(lr, Tensor):
        return 0, 0, lr
    if lr.device != device:
        return 0, 0, float(lr)
    if lr.dtype in (torch.float32, torch.float64):
        return lr.data_ptr(), 8 * lr.dtype.itemsize, 0.0
    raise ValueError(
        f"lr is a {lr.dtype} tensor on {lr.device}: give a float, or a float32 or float64 tensor"
    )
