"""The optimizers whose step is timed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from neumann import Neumann

# One warm-up step and no further reset: every timed step is an iteration of the series.
CLOCK: dict[str, Any] = {"warmup_steps": 1, "reset_steps": 0}
SLOW = "abce"  # for what loops over tensors in Python
TORCH: dict[str, tuple[Any, int]] = {  # bytes per weight that the fused form moves
    "SGD nesterov": (partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True), 20),
    "Adam": (partial(torch.optim.Adam, lr=1e-3), 28),
    "AdamW": (partial(torch.optim.AdamW, lr=1e-3), 28),
}


@dataclass(frozen=True)
class Candidate:
    """An optimizer to time."""

    name: str
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    bytes_per_weight: int | None = None  # moved by one pass over memory; None if several passes
    cases: str = "abcde"


class PlainCopy(torch.optim.Optimizer):
    """Copies as many float32 numbers as there are weights: what the memory can do."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        total = sum(p.numel() for p in params)
        self.source, self.target = (torch.randn(total, device=params[0].device) for _ in range(2))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.target.copy_(self.source)


def neumann_candidates(device: torch.device) -> list[Candidate]:
    def build(**options: Any) -> Any:
        return partial(Neumann, lr=1e-3, **CLOCK, **options)

    found = [
        Candidate("Neumann fused", build(fused=True), 28),
        Candidate("Neumann fused, bf16 state", build(fused=True, state_dtype=torch.bfloat16), 20),
        Candidate("Neumann fused, no forces", build(fused=True, cubic=0.0, repulsive=0.0), 20),
        Candidate("Neumann foreach", build(foreach=True)),
        Candidate("Neumann single", build(foreach=False), cases=SLOW),
    ]
    if device.type == "cuda":
        capturable = build(fused=True, capturable=True)
        found.insert(3, Candidate("Neumann fused, capturable", capturable, 28))
        found.append(Candidate("Neumann spectral", build(precondition="spectral"), cases="ae"))
    return found


def torch_candidates() -> list[Candidate]:
    found = []
    for name, (optimizer, moved) in TORCH.items():
        found += [
            Candidate(f"{name} single", partial(optimizer, foreach=False, fused=False), cases=SLOW),
            Candidate(f"{name} foreach", partial(optimizer, foreach=True, fused=False)),
            Candidate(f"{name} fused", partial(optimizer, foreach=False, fused=True), moved),
        ]
    return found


def schedule_free_candidates() -> list[Candidate]:
    try:
        import schedulefree
    except ImportError:
        print("schedulefree is not installed; its row is left out", file=sys.stderr)
        return []

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = schedulefree.AdamWScheduleFree(params, lr=1e-3, foreach=True)
        optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    return [Candidate("schedule-free AdamW foreach", build)]


def all_candidates(device: torch.device) -> list[Candidate]:
    ours, theirs = neumann_candidates(device), torch_candidates()
    return [Candidate("plain copy", PlainCopy, 8), *ours, *theirs, *schedule_free_candidates()]


def version_candidates(device: torch.device) -> list[Candidate]:
    """What two versions of the library are compared on.

    AdamW is the control: it does not change with the library, so its ratio shows the noise.
    """
    control = [candidate for candidate in torch_candidates() if candidate.name == "AdamW fused"]
    return [*control, *neumann_candidates(device)]


def select(candidates: list[Candidate], case: str, only: str | None) -> list[Candidate]:
    """Those that run on a case and whose name contains `only`."""
    return [c for c in candidates if case in c.cases and (only is None or only in c.name)]
