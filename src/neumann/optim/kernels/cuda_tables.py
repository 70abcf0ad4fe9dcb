"""What the host tells the kernels: groups, settings, reset times and the gradients' addresses.

Each is packed into bytes, 8 to a number, and a `Mirror` keeps a copy of the bytes on the device. It
sends them again only when they changed, from pinned memory, and the host does not wait.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from neumann.optim.phases import HORIZON, RESET_LIMIT, Shared, Timetable


@dataclass
class Group:
    """A parameter group on one device, one entry a parameter in each list."""

    weights: list[Tensor]
    gradients: list[Tensor | None]
    iterates: list[Tensor]
    offsets: list[Tensor] | None  # None: without forces they are not kept
    lr: float | Tensor  # a tensor: 0-d, float32 or float64, on the device
    momentum: float
    weight_decay: float  # L2, added to the gradient
    decoupled_decay: float
    maximize: bool
    last_momentum: Tensor  # 0-d float64 on the device; written: μ of the step


class Mirror:
    """Bytes of the host, as an int64 tensor on the device that is never overwritten.

    New contents make a new tensor, sent from pinned memory without waiting. So a captured graph
    keeps the tensor that it was captured with; contents that first appear during a capture are sent
    again at each replay, from memory set aside for that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._contents: bytes | None = None
        self._tensor = torch.empty(0, dtype=torch.int64)
        self._reserve: Tensor | None = None
        self._captured: list[Tensor] = []

    def follow(self, contents: bytes, capturing: bool = False) -> Tensor:
        """The tensor that holds these bytes (8 to an element)."""
        if contents != self._contents:
            host = torch.frombuffer(bytearray(contents or bytes(8)), dtype=torch.int64)
            if capturing:
                source = self._pinned(host)
                tensor = source.to(self._device, non_blocking=True)
                self._captured += [source, tensor]
                return tensor  # empty until the graph is replayed
            if self._device.type == "cuda":
                if self._reserve is None or self._reserve.shape != host.shape:
                    self._reserve = torch.empty_like(host, pin_memory=True)
                # Once freed, pinned memory is not handed out again before the copy has happened.
                host = torch.empty_like(host, pin_memory=True).copy_(host)
            self._tensor = host.to(self._device, non_blocking=True)
            self._contents = contents
        if capturing:
            self._captured.append(self._tensor)
        return self._tensor

    def _pinned(self, host: Tensor) -> Tensor:
        """Pinned memory for good; allocating it during a capture is not always allowed."""
        reserve, self._reserve = self._reserve, None
        if reserve is None or reserve.shape != host.shape:
            reserve = torch.empty_like(host, pin_memory=True)
        return reserve.copy_(host)


def column(addresses: Sequence[int]) -> bytes:
    """The gradients' addresses, as the kernels read them."""
    return struct.pack(f"={len(addresses)}q", *addresses)


def settings(groups: Sequence[Group], shared: Shared, device: torch.device) -> bytes:
    """A header and an entry for each group, as the kernels read them."""
    times, interval = reset_times(shared.timetable)
    parts = [
        struct.pack(
            "=4q4d",
            shared.timetable.warmup_steps,
            interval,
            len(times) // 8,
            shared.bounded,
            shared.cubic,
            shared.repulsive,
            shared.average,
            0.0,
        )
    ]
    for group in groups:
        address, bits, lr = _learning_rate(group.lr, device)
        parts.append(
            struct.pack(
                "=3q5d",
                address,
                bits,
                group.last_momentum.data_ptr(),
                lr,
                group.momentum,
                group.weight_decay,
                group.decoupled_decay,
                -1.0 if group.maximize else 1.0,
            )
        )
    return b"".join(parts)


@lru_cache(maxsize=64)
def reset_times(timetable: Timetable) -> tuple[bytes, int]:
    """Reset times, and the interval at which they go on after the last (0: never)."""
    times, interval = timetable.resets(RESET_LIMIT, HORIZON)
    return struct.pack(f"={len(times)}q", *times), interval


def _learning_rate(lr: float | Tensor, device: torch.device) -> tuple[int, int, float]:
    """Address and width of a tensor on the device; or 0, 0 and the number."""
    if not isinstance(lr, Tensor):
        return 0, 0, lr
    if lr.device == device and lr.dtype in (torch.float32, torch.float64):
        return lr.data_ptr(), 8 * lr.dtype.itemsize, 0.0
    if lr.device.type == "cpu":
        return 0, 0, float(lr)
    raise ValueError(
        f"lr is a {lr.dtype} tensor on {lr.device}: give a float, or a float32 or float64 tensor "
        f"on {device} or on the CPU"
    )
