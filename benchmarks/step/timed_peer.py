"""A peer that steps on a network, with the times of its steps and the memory that it holds."""

import gc
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.timing import synchronize
from benchmarks.step.peers import Peer, Stepping, allocate_workspaces
from benchmarks.step.timed_optimizer import TimedSteps

WARM_UP = 4  # steps: the first ones create state and compile


class TimedPeer(TimedSteps):
    """A peer on a network, with the times of its steps."""

    def __init__(self, peer: Peer, model: nn.Module, device: torch.device) -> None:
        super().__init__(device, peer.period)
        self.peer = peer
        self._model = model
        self._stepping = Stepping([], [])
        self.state_bytes = self.graph_bytes = 0
        self.build_seconds = 0.0

    def build(self) -> None:
        synchronize(self.device)
        allocate_workspaces(self.device)
        gc.collect()  # so that no garbage of others goes while this is measured
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        start = time.perf_counter()
        self._stepping = self.peer.build(self._model)
        for _ in range(WARM_UP):
            self.prepare()
            self.step()
        synchronize(self.device)
        self.build_seconds = time.perf_counter() - start
        gc.collect()
        if self.device.type == "cuda" and not self._stepping.counts_allocated:
            self.state_bytes = torch.cuda.memory_allocated() - before
        else:
            self.state_bytes = sum(count_bytes(o.state) for o in self._stepping.optimizers)
        self.graph_bytes = self._stepping.graph_bytes

    def release(self) -> None:
        self._stepping = Stepping([], [])

    def prepare(self) -> None:
        self._stepping.give_gradients()

    def step(self) -> None:
        self._stepping.step()


def count_bytes(state: Any) -> int:
    """The memory of all tensors inside nested dicts and lists; shared ones count once."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif hasattr(value, "values"):
            for item in value.values():
                visit(item)

    visit(state)
    return sum(found.values())
