"""Runs of Neumann beside the oracle on a noisy quadratic, and how far they end apart."""

import importlib.metadata
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from neumann import Neumann
from neumann.optim import backends
from neumann.optim.backends.cpu import NumbaBackend
from neumann.optim.backends.cuda import TritonBackend
from tests.oracle import Group, Oracle


def _can_interpret_triton() -> bool:
    """Whether Triton can interpret the kernels; before 3.3 it cannot, although it compiles them."""
    if TritonBackend.unavailable(1) is not None:
        return False
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 3)


# The kernels that can run here: Triton interpreted, on CPU tensors.
FUSED: dict[str, dict[str, Any]] = {}
if not torch.cuda.is_available():
    if NumbaBackend.unavailable(1) is None:
        FUSED["numba"] = {"fused": True}
    if _can_interpret_triton():
        FUSED["triton"] = {"fused": True}
# Every way a step can be computed; each is held to the same tests.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    **FUSED,
}


def use_triton_on_cpu(monkeypatch: Any) -> None:
    """Send fused=True to the Triton kernels for CPU tensors, which they run interpreted."""
    monkeypatch.setattr(backends, "FUSED", [TritonBackend])
    monkeypatch.setattr(TritonBackend, "device_type", "cpu")


# Straddles the vector widths of every machine, and two of a kernel's blocks.
SIZES = (1, 3, 7, 16, 1000, 9000)


@dataclass
class Run:
    """A configuration. Groups are dicts of sizes, or shapes, and of what differs between groups."""

    groups: list[dict[str, Any]]
    steps: int = 300
    warmup: int = 40
    interval: int = 25
    options: dict[str, Any] = field(default_factory=dict)  # as Neumann takes them
    schedule: Callable[[int], float] = lambda step: 1.0  # factor on every lr, by step from 0
    missing: Callable[[int, int, int], bool] = lambda step, group, index: False
    scale: float = 1.0  # of the gradients

    def gradient(self, step: int, group: int, index: int, w: np.ndarray) -> np.ndarray | None:
        """Curvature between 0.1 and 1 around w = 3, and fresh noise: never zero, depends on w."""
        if self.missing(step, group, index):
            return None
        noise = _noise(step, group, index, w.shape)
        return self.scale * (_curvature(w.shape) * (w - 3) + noise)


@lru_cache(maxsize=8192)  # the oracle and every implementation ask for the same
def _noise(step: int, group: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    seed = zlib.crc32(f"{step} {group} {index}".encode())
    noise = np.asarray(np.random.default_rng(seed).standard_normal(shape))
    noise.flags.writeable = False
    return noise


@cache
def _curvature(shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    curvature = np.linspace(0.1, 1.0, max(size, 1))[:size].reshape(shape)
    curvature.flags.writeable = False
    return curvature


def initial(group: int, index: int, shape: int | tuple[int, ...]) -> np.ndarray:
    seed = zlib.crc32(f"{group} {index} {shape}".encode())
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


def oracle_of(run: Run) -> Oracle:
    names = {
        "cubic": "alpha",
        "repulsive": "beta",
        "average": "gamma",
        "variables": "variables",
        "bounded": "bounded",
        "reset_growth": "growth",
    }
    shared = {names[k]: v for k, v in run.options.items() if k in names}
    own = {"momentum": "momentum", "weight_decay": "weight_decay", "maximize": "maximize"}
    own["decoupled_weight_decay"] = "decoupled"
    groups = []
    for g, group in enumerate(run.groups):
        merged = {**run.options, **group}
        arguments = {ours: merged[theirs] for theirs, ours in own.items() if theirs in merged}
        weights = [initial(g, i, size) for i, size in enumerate(group["sizes"])]
        groups.append(Group(weights, lr=merged["lr"], **arguments))
    return Oracle(groups, warmup=run.warmup, interval=run.interval, **shared)


def optimizer_of(
    run: Run, dtype: torch.dtype, device: str = "cpu", **implementation: Any
) -> Neumann:
    groups = [
        {
            "params": [
                torch.nn.Parameter(torch.tensor(initial(g, i, size), dtype=dtype, device=device))
                for i, size in enumerate(group["sizes"])
            ],
            **{k: v for k, v in group.items() if k != "sizes"},
        }
        for g, group in enumerate(run.groups)
    ]
    options = {"lr": 0.1, **run.options, **implementation}
    return Neumann(groups, warmup_steps=run.warmup, reset_steps=run.interval, **options)


def advance(run: Run, optimizer: Neumann, step: int) -> None:
    """One step of the optimizer, at gradients of its own weights."""
    for g, group in enumerate(optimizer.param_groups):
        group["lr"] = run.groups[g].get("lr", run.options.get("lr")) * run.schedule(step)
        for i, p in enumerate(group["params"]):
            gradient = run.gradient(step, g, i, p.detach().cpu().double().numpy())
            p.grad = None if gradient is None else torch.tensor(gradient).to(p)
    optimizer.step()


def advance_oracle(run: Run, oracle: Oracle, step: int) -> None:
    gradients = []
    for g, group in enumerate(oracle.groups):
        group.lr = run.groups[g].get("lr", run.options.get("lr")) * run.schedule(step)
        gradients.append([run.gradient(step, g, i, w) for i, w in enumerate(group.weights)])
    oracle.step(gradients)


def finished_oracle(run: Run) -> Oracle:
    oracle = oracle_of(run)
    for step in range(run.steps):
        advance_oracle(run, oracle, step)
    return oracle


def finished(run: Run, dtype: torch.dtype = torch.float64, **implementation: Any) -> Neumann:
    optimizer = optimizer_of(run, dtype, **implementation)
    for step in range(run.steps):
        advance(run, optimizer, step)
    return optimizer


def relative_error(ours: torch.Tensor, exact: np.ndarray) -> float:
    """Norm of the error over norm of the exact tensor."""
    difference = np.linalg.norm(ours.detach().cpu().double().numpy().astype(exact.dtype) - exact)
    return float(difference / max(np.linalg.norm(exact), np.finfo(np.float64).tiny))


def deviation(optimizer: Neumann, oracle: Oracle) -> float:
    """The largest relative error of any tensor: weights, evaluation weights and, if kept, v."""
    exact = [w for group in oracle.groups for w in group.weights]
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = list(zip(ours, exact, strict=True))
    pairs += zip(
        optimizer.eval_params(), [w for row in oracle.evaluation() for w in row], strict=True
    )
    if oracle.alpha or oracle.beta:
        average = [v for group in oracle.groups for v in group.average]
        pairs += zip(optimizer.average_params(), average, strict=True)
    return max(relative_error(a, b) for a, b in pairs)
