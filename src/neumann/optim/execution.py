"""How a step is carried out: which implementation runs, and where its scalars live.

On the host the clock is a CPU tensor: phase, rows and forces are worked out in Python, and the
update runs per tensor, as foreach or through numba. On CUDA with Triton nothing is: clock, phase,
rows and r² stay in device memory, so that no step waits for the host.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from neumann.optim import update
from neumann.optim.distance import distance_squared, force, root
from neumann.optim.kernels import cpu, cuda
from neumann.optim.phases import IDLE, Phase, Shared, momentum_at, row


class Implementation(enum.StrEnum):
    """The forms of the one update."""

    SINGLE = "single"
    FOREACH = "foreach"
    CPU = "fused on CPU"
    CUDA = "fused on CUDA"


@dataclass(frozen=True)
class Work:
    """One group's share of a step: its options, and lists with an entry for each parameter."""

    options: Mapping[str, Any]
    weights: list[Tensor]
    gradients: list[Tensor | None]
    iterates: list[Tensor]
    offsets: list[Tensor] | None  # None: without forces they are not kept
    momentum: Tensor  # receives μ
    part: int = 0  # which of the sums of squares these tensors go into

    def with_gradient(self, wanted: bool = True) -> update.Tensors:
        """The tensors of those parameters that have a gradient, or of those that have none."""
        chosen = [(g is not None) is wanted for g in self.gradients]
        return update.Tensors(
            list(compress(self.weights, chosen)),
            [g for g in self.gradients if g is not None] if wanted else [],
            list(compress(self.iterates, chosen)),
            None if self.offsets is None else list(compress(self.offsets, chosen)),
        )


def choose(groups: Sequence[Mapping[str, Any]], parts: int = 1) -> Implementation:
    """The implementation that the flags ask for, or the fastest there is where they leave it open.

    Raises where `fused=True` or `capturable=True` cannot be had. `parts` is the number of sums of
    squares to be kept apart.
    """
    first = groups[0]
    devices = {p.device for group in groups for p in group["params"]}
    chosen, why = _fused(devices) if devices else (Implementation.FOREACH, None)
    if chosen is Implementation.CUDA and parts > 1:
        chosen, why = None, "its one sum cannot keep apart what is sharded in different ways"
    if devices and first["capturable"] and chosen is not Implementation.CUDA:
        raise RuntimeError(
            "capturable=True needs the fused CUDA kernel, which cannot run here: "
            + (why or "the parameters are on the CPU")
        )
    if first["differentiable"] or first["foreach"] is False:
        return Implementation.SINGLE
    if first["foreach"] or first["fused"] is False:
        return Implementation.FOREACH
    if why is not None and first["fused"]:
        raise RuntimeError(f"fused=True cannot run here: {why}")
    return Implementation.FOREACH if chosen is None else chosen


def _fused(devices: set[torch.device]) -> tuple[Implementation | None, str | None]:
    """The kernel for these devices, or why there is none."""
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        return None, f"the parameters must be on one device, and are on {found}"
    (device,) = devices
    if device.type == "cuda":
        why, kernel = cuda.unavailable(), Implementation.CUDA
    elif device.type == "cpu":
        why, kernel = cpu.unavailable(), Implementation.CPU
    else:
        return None, f"there is no kernel for {device.type}"
    return (kernel, None) if why is None else (None, why)


class Host:
    """Steps whose clock and coefficients are Python numbers."""

    def __init__(self, implementation: Implementation) -> None:
        self.implementation = implementation
        self._passes: dict[int, cpu.Pass] = {}

    def step(
        self,
        works: Sequence[Work],
        shared: Shared,
        clock: Tensor,
        before: Tensor,
        after: Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Tick, and update every group. `before` is r²; `after` receives Σδ², for each part one.

        Where nothing is sharded the two are one tensor. `found_inf` is for the device alone: on
        the host a step to be skipped does not get here.
        """
        clock.add_(1)
        step = int(clock)
        phase, t = shared.timetable.place(step)
        forces = bool(shared.cubic or shared.repulsive)
        now = _Now(
            phase,
            t,
            step,
            # The force acts in the iterate phase alone.
            root(before) if forces and phase is Phase.ITERATE else None,
            1.0 if grad_scale is None else 1 / float(grad_scale),
        )
        sums = [self._group(index, work, shared, now) for index, work in enumerate(works)]
        # A parameter without a gradient is left alone, but its m is reset and its δ counts in r.
        resting = [work.with_gradient(False) for work in works]
        if phase is Phase.RESET:
            for iterate in chain.from_iterable(tensors.iterates for tensors in resting):
                iterate.zero_()
        if forces:
            self._add_up(works, sums, after)

    def _add_up(self, works: Sequence[Work], sums: Sequence[float], after: Tensor) -> None:
        """Σδ² of each part; the pass over memory has summed on its way what it touched."""
        fused = self.implementation is Implementation.CPU
        totals = []
        for part in range(after.numel()):
            offsets: list[Tensor] = []
            summed = 0.0
            for work, total in zip(works, sums, strict=True):
                if work.part == part:
                    left = work.with_gradient(False) if fused else work
                    offsets += left.offsets or ()
                    summed += total
            if torch.is_grad_enabled():
                offsets = [o.clone() for o in offsets]  # the next step writes the originals
            totals.append(distance_squared(offsets, after.device) + summed)
        after.copy_(torch.stack(totals).reshape(after.shape))

    def measure(self, works: Sequence[Work], after: Tensor) -> None:
        """Σδ² of each part as it is, with the additions of a step."""
        sums = [0.0] * len(works)
        if self.implementation is Implementation.CPU:
            for index, work in enumerate(works):
                tensors = work.with_gradient()
                if tensors.weights:
                    sums[index] = self._pass(index).run(tensors, IDLE, 0.0)
        self._add_up(works, sums, after)

    def _pass(self, index: int) -> cpu.Pass:
        return self._passes.setdefault(index, cpu.Pass())

    def _group(self, index: int, work: Work, shared: Shared, now: "_Now") -> float:
        """Update one group; the sum of its δ² where the pass over memory has summed it."""
        options = work.options
        lr = options["lr"] if options["differentiable"] else float(options["lr"])
        momentum = momentum_at(now.t, options["momentum"])
        work.momentum.fill_(momentum)
        tensors = work.with_gradient()
        if not tensors.weights:
            return 0.0
        decay, decoupled = options["weight_decay"], options["decoupled_weight_decay"]
        coefficients = row(now.phase, lr, momentum, shared.average, decay if decoupled else 0.0)
        l2 = 0.0 if decoupled else decay
        c = None
        if now.distance is not None:
            c = force(
                now.distance,
                lr,
                momentum,
                shared.average,
                shared.cubic,
                shared.repulsive,
                shared.bounded,
            )
        if self.implementation is Implementation.CPU:
            return self._pass(index).run(
                tensors,
                coefficients,
                0.0 if c is None else float(c),
                weight_decay=l2,
                maximize=options["maximize"],
                grad_scale=now.grad_factor,
                rounding="stochastic",
                seed=now.step,
            )
        single = self.implementation is Implementation.SINGLE
        update.apply(
            tensors,
            coefficients,
            c,
            update.update_single if single else update.update_foreach,
            weight_decay=l2,
            maximize=options["maximize"],
            seed=now.step,
        )
        return 0.0

    def settle(self, squared: Tensor) -> None:
        """r² is always up to date here."""

    def forget(self) -> None:
        """Nothing is pending here."""


@dataclass(frozen=True)
class _Now:
    """One step on the host."""

    phase: Phase
    t: int
    step: int
    distance: Tensor | None  # r, in a step where a force acts
    grad_factor: float  # 1 / grad_scale


class Device:
    """Steps whose clock and coefficients never leave the GPU."""

    implementation = Implementation.CUDA

    def __init__(self, device: torch.device) -> None:
        self._stepper = cuda.Stepper(device, rounding="stochastic")

    def step(
        self,
        works: Sequence[Work],
        shared: Shared,
        clock: Tensor,
        before: Tensor,
        after: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Tick, and update every group, all on the device; Σδ² is pending until :meth:`settle`."""
        self._stepper.step(
            [_cuda_group(work) for work in works],
            shared,
            clock,
            before,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def measure(self, works: Sequence[Work], after: Tensor) -> None:
        """Σδ² as it is, with the additions of a step."""
        self._stepper.measure([_cuda_group(work) for work in works], after)

    def settle(self, squared: Tensor) -> None:
        """Bring r² up to date, with the bits that the next step would see."""
        self._stepper.settle(squared)

    def forget(self) -> None:
        """r² has been set from outside: what was pending no longer counts."""
        self._stepper.forget()


def _cuda_group(work: Work) -> cuda.Group:
    options = work.options
    decay, decoupled = options["weight_decay"], options["decoupled_weight_decay"]
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.device != work.momentum.device:
        lr = float(lr)
    return cuda.Group(
        weights=work.weights,
        gradients=work.gradients,
        iterates=work.iterates,
        offsets=work.offsets,
        lr=lr,
        momentum=options["momentum"],
        weight_decay=0.0 if decoupled else decay,
        decoupled_decay=decay if decoupled else 0.0,
        maximize=options["maximize"],
        last_momentum=work.momentum,
    )
