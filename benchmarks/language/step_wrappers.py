"""What a lead does around the steps of an optimizer.

A wrapper has the interface of an optimizer, so the training loop does not know about it. Wrappers
count the steps themselves.
"""

from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.language.language_arms import RAMP, Setting, find_lr_factor
from benchmarks.language.output_preconditioners import create_basis, turn_basis
from neumann.optim.modes import compute_evaluation
from neumann.optim.preconditioners import Preconditioner
from neumann.optim.preconditioners.memory import stages_of

WINDOW = (0.16, 0.77)  # of the run: where the weights are extrapolated


class Wrapper:
    """An optimizer with something done around its steps; this one does nothing."""

    def __init__(self, inner: Any, setting: Setting, steps: int) -> None:
        self.inner, self.setting, self.steps = inner, setting, steps
        self.done = 0  # steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> dict[Tensor, Any]:
        state: dict[Tensor, Any] = self.inner.state
        return state

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.prepare()
        self.inner.step()
        self.done += 1
        self.finish()

    def eval(self) -> None:
        """Show the weights to evaluate."""
        if hasattr(self.inner, "eval"):
            self.inner.eval()

    def prepare(self) -> None:
        """What comes before a step."""

    def finish(self) -> None:
        """What comes after a step."""


class Extrapolated(Wrapper):
    """Gradients are taken at w + β·δ; δ ← γ(δ + Δw) is the offset of w from its moving average.

    β is the strength times the learning rate as a share of its peak, inside WINDOW and 0 elsewhere.
    The optimizer itself steps from w, and w is what is evaluated.
    """

    def __init__(self, inner: Any, setting: Setting, steps: int, memory: float) -> None:
        super().__init__(inner, setting, steps)
        self._memory = memory
        self._own = [p.detach().clone() for p in self.parameters]
        self._offsets = [torch.zeros_like(p) for p in self._own]

    def prepare(self) -> None:
        self._restore()

    def finish(self) -> None:
        inside = WINDOW[0] <= self.done / self.steps < WINDOW[1]
        beta = self.setting.strength * find_lr_factor(self.done, self.steps) if inside else 0.0
        for p, own, offset in zip(self.parameters, self._own, self._offsets, strict=True):
            offset.add_(p - own).mul_(self._memory)
            own.copy_(p)
            p.add_(offset, alpha=beta)

    @torch.no_grad()
    def eval(self) -> None:
        self._restore()
        super().eval()

    def _restore(self) -> None:
        for p, own in zip(self.parameters, self._own, strict=True):
            p.copy_(own)


class FixedNorm(Wrapper):
    """Hidden matrices keep their initial Frobenius norm, and have no decay.

    The weights that are evaluated are rescaled: with x = w − μm, x ← x·‖x₀‖/‖x‖, and w moves along
    with it. m stays, because it is a displacement and not a position. The strength multiplies the
    learning rate of these matrices, which decay no longer limits.
    """

    def __init__(self, inner: Any, setting: Setting, steps: int, hidden: list[Tensor]) -> None:
        super().__init__(inner, setting, steps)
        self._norms = {p: p.detach().norm() for p in hidden}
        self._groups = [g for g in self.param_groups if g["params"][0] in self._norms]
        for group in self._groups:
            group["weight_decay"] = 0.0

    def prepare(self) -> None:
        for group in self._groups:
            group["lr"] *= self.setting.strength

    def finish(self) -> None:
        for p, norm in self._norms.items():
            state = self.state.get(p, {})
            shown = compute_evaluation(p, state) if "iterate" in state else p.detach().clone()
            p.add_(shown * (norm / shown.norm() - 1))


class HiddenRate(Wrapper):
    """A control: another learning rate of hidden matrices, with the same lr · decay."""

    def __init__(self, inner: Any, setting: Setting, steps: int, hidden: list[Tensor]) -> None:
        super().__init__(inner, setting, steps)
        chosen = set(hidden)
        self._groups = [g for g in self.param_groups if g["params"][0] in chosen]
        for group in self._groups:
            group["weight_decay"] /= setting.strength

    def prepare(self) -> None:
        for group in self._groups:
            group["lr"] *= self.setting.strength


class CautiousDecay(Wrapper):
    """Elements decay only where the step already moves them towards zero.

    The step is Δw without decay: Neumann's includes its momentum. The strength multiplies the
    decay, because about half of the elements have none.
    """

    def __init__(self, inner: Any, setting: Setting, steps: int) -> None:
        super().__init__(inner, setting, steps)
        self._decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        self._before: list[Tensor] = []

    def prepare(self) -> None:
        self._before = [p.detach().clone() for p in self.parameters]

    def finish(self) -> None:
        before = iter(self._before)
        for group, decay in zip(self.param_groups, self._decays, strict=True):
            share = group["lr"] * decay * self.setting.strength
            for p in group["params"]:
                decay_cautiously(p.detach(), next(before), share)


def decay_cautiously(weights: Tensor, before: Tensor, share: float) -> None:
    """Take a share of the weights before a step away where the step has made them smaller."""
    agrees = (weights - before) * before < 0
    weights.sub_(before * agrees, alpha=share)


class Cooldown(Wrapper):
    """After the ramp the learning rate is its peak times (1 − t)^strength, not 1 − t."""

    def __init__(
        self, inner: Any, setting: Setting, steps: int, chosen: list[Tensor] | None = None
    ) -> None:
        super().__init__(inner, setting, steps)
        self._chosen = None if chosen is None else set(chosen)

    def prepare(self) -> None:
        if self.done < max(1, round(RAMP * self.steps)):
            return
        correction = find_lr_factor(self.done, self.steps) ** (self.setting.strength - 1)
        for group in self.param_groups:
            if self._chosen is None or group["params"][0] in self._chosen:
                group["lr"] *= correction


class LateCooldown(Wrapper):
    """After the ramp the learning rate stays at its peak; it falls in the last part of the run.

    The strength is that part, as a share of what follows the ramp: 1 is the usual cooldown.
    """

    def prepare(self) -> None:
        if self.done < max(1, round(RAMP * self.steps)):
            return
        usual = find_lr_factor(self.done, self.steps)
        for group in self.param_groups:
            group["lr"] *= min(1.0, usual / self.setting.strength) / usual


class ChangedGradients(Wrapper):
    """Hidden matrices get directions of a preconditioner in place of their gradients.

    This is how Muon, whose own momentum is off then, gets what comes before the polar step.
    """

    def __init__(
        self, inner: Any, setting: Setting, steps: int, hidden: list[Tensor], p: Preconditioner
    ) -> None:
        super().__init__(inner, setting, steps)
        self._hidden, self._stages = hidden, stages_of(p)
        self._states = [[stage.create(w) for w in hidden] for stage in self._stages]
        for group in self.param_groups:
            if "momentum" in group:  # AdamW's groups have none
                group["momentum"] = 0.0

    def prepare(self) -> None:
        directions = [w.grad for w in self._hidden if w.grad is not None]
        for stage, states in zip(self._stages, self._states, strict=True):
            directions = stage.apply(directions, states)
        for w, direction in zip(self._hidden, directions, strict=True):
            w.grad = direction


class RotatedOutput(Wrapper):
    """The optimizer sees the output layer in the basis of the eigenvectors of its GᵀG.

    This is how AdamW, which takes the output layer of Muon, becomes SOAP on one side: its first
    moment moves along when the basis changes. The strength multiplies the layer's learning rate.
    """

    def __init__(self, inner: Any, setting: Setting, steps: int, output: Tensor) -> None:
        super().__init__(inner, setting, steps)
        self._output, self._state = output, create_basis(output)
        (self._group,) = (group for group in self.param_groups if group["params"][0] is output)
        self._before = output.detach().clone()

    def prepare(self) -> None:
        gradient, basis = cast(Tensor, self._output.grad), self._state["basis"]
        old = basis.clone()
        turn_basis(self._state, gradient, self.done + 1)
        if self.done:
            average = self.state[self._output]["exp_avg"]
            average.copy_(average @ old.mT @ basis)
        self._group["lr"] *= self.setting.strength
        self._before.copy_(self._output)
        self._output.grad = gradient @ basis

    def finish(self) -> None:
        decayed = self._before * (1 - self._group["lr"] * self._group["weight_decay"])
        step = self._output - decayed
        self._output.copy_(decayed + step @ self._state["basis"].mT)
