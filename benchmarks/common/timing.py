"""Clocks for work that runs asynchronously on a GPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

CYCLES_PER_MS = 2e6  # of a GPU at 2 GHz


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_clock(device: torch.device) -> float:
    """Seconds, after everything queued so far has finished."""
    synchronize(device)
    return time.perf_counter()


def time_on_gpu(call: Callable[[], Any], delay_ms: float = 2.0) -> float:
    """Milliseconds that the GPU is busy with `call`.

    The work is queued behind a kernel that sleeps for about `delay_ms`. If the host needs less time
    than that to launch everything, launch latency does not count.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(CYCLES_PER_MS * delay_ms))  # torch has no public equivalent
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def take_turns(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The times that each timer returns, visited in turns after a round that warms up."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds + 1):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: found[1:] for name, found in times.items()}


def find_quartiles(values: Sequence[float]) -> list[float] | None:
    """The lower quartile, the median and the upper quartile; None without values."""
    return statistics.quantiles(values, n=4, method="inclusive") if values else None
