"""The Neumann optimizer: Algorithm 2 of Krishnan, Xiao and Saurous (2017), as a torch.optim class.

The parameters hold the displaced weights w while training; the weights to evaluate and to ship are
w − μm. The class keeps the contract of torch.optim (groups, state, modes, checkpoints) and gathers
lists. What happens when is in `phases`, the force in `distance`, the arithmetic in `update`, how a
step is carried out in `execution`.
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from neumann.optim import options, traced
from neumann.optim.checkpoint import CLOCK, DISTANCE, OFFSET, SKIPPED
from neumann.optim.diagnostics import Diagnostics, GroupDiagnostics
from neumann.optim.execution import Implementation
from neumann.optim.gathering import Gathering
from neumann.optim.preconditioners import Preconditioner
from neumann.optim.shards import local
from neumann.optim.state import has_forces


class Neumann(Gathering):
    """Neumann optimizer: large-batch training with one hyperparameter to tune, the learning rate.

    The first `warmup` steps are plain SGD. After them each step adds a term to a Neumann series for
    the inverse Hessian applied to the gradient, regularized by a cubic attraction to the moving
    average of the weights and a repulsion from it; resets start the series anew::

        d = g + (α·r − β/r³)·(w − v)        r = ‖w − v‖ over all parameters
        m ← μ·m − η·d
        w ← w + μ·m − η·d
        v ← w + γ·(v − w)

    While training, the parameters hold w. Evaluate and ship w − μm: call :meth:`eval` before
    evaluating and :meth:`train` before going on, or use :meth:`evaluating` as a context manager.

    Args:
        params: parameters, named parameters or groups, as in torch.optim. Groups may differ in lr,
            momentum, weight decay, precondition and maximize.
        lr: the learning rate η, a float or a 0-d tensor. The only thing to tune; values that suit
            Nesterov SGD with momentum 0.9 are the place to start, under the spectral preconditioner
            0.015 and under the diagonal one 0.0025.
        steps_per_epoch: optimizer steps (not micro-batches) an epoch; turns the epoch counts below
            into steps, rounded half up.
        warmup_epochs: length of the SGD warm-up. None is 5, under a preconditioner 0.
        reset_epochs: first interval K between resets. None is 10, under a preconditioner 0.
        warmup_steps: the warm-up in steps; wins over `warmup_epochs`.
        reset_steps: K in steps; wins over `reset_epochs`. 0: no reset after the one at t = 1.
        reset_growth: the interval grows by this factor after each reset (1.0 is the printed
            algorithm, t = 1 mod K).
        momentum: the peak of μ(t) = 1 − 1/(1 + t). Schedulers may change it. None is 0.9, under the
            spectral preconditioner 0.6.
        cubic: α, the strength of the attraction. None is 1e-7, under a preconditioner 0.
        repulsive: β per variable, the strength of the repulsion. None is 1e-5, under a
            preconditioner 0.
        average: γ of the moving average.
        variables: what the paper's "num variables" counts: "tensors" or "elements" of the
            parameters that require gradients, or the count itself.
        bounded: keep the repulsion from exploding close to the average.
        weight_decay: λ, added to the gradient as λw unless decoupled.
        decoupled_weight_decay: subtract ηλw from the weights instead. None is False, under a
            preconditioner True.
        skip_nonfinite: leave everything untouched, the clock included, when any gradient is not
            finite. Costs one host synchronisation a step on an accelerator.
        state_dtype: the dtype of m and δ; None is each parameter's own. With torch.bfloat16 the
            state takes half the memory and traffic of float32; it is rounded stochastically.
        precondition: P, which turns gradients into the directions that the series sums: None (the
            paper), "diagonal", "spectral" or a :class:`Preconditioner`. Groups may differ in it;
            the defaults above follow this one.
        maximize: maximize the objective instead.
        foreach: use the multi-tensor form; None chooses it. False is the single-tensor form.
        differentiable: let autograd record the step (single-tensor form).
        capturable: let a CUDA graph capture the step; the learning rate becomes a tensor on the
            device. Needs the fused CUDA kernel.
        fused: one pass over memory, in Triton on CUDA and in numba on the CPU (extra `cpu`). None
            chooses it where it can run; True raises where it cannot, and says why.
        process_group: the torch.distributed group among whose processes whole parameters were
            divided, as ZeRO and pipeline stages do: r is the distance over all of them. Parameters
            that are DTensors (FSDP2) know their groups themselves, and replicas (DDP) need none.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        steps_per_epoch: float | None = None,
        warmup_epochs: float | None = None,
        reset_epochs: float | None = None,
        warmup_steps: int | None = None,
        reset_steps: int | None = None,
        reset_growth: float = 2.0,
        momentum: float | None = None,
        cubic: float | None = None,
        repulsive: float | None = None,
        average: float = 0.99,
        variables: str | int = "tensors",
        bounded: bool = True,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool | None = None,
        skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None,
        precondition: str | Preconditioner | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        given: dict[str, Any] = {
            "lr": lr,
            "warmup_epochs": warmup_epochs,
            "reset_epochs": reset_epochs,
            "warmup_steps": warmup_steps,
            "reset_steps": reset_steps,
            "reset_growth": reset_growth,
            "momentum": momentum,
            "cubic": cubic,
            "repulsive": repulsive,
            "average": average,
            "variables": variables,
            "bounded": bounded,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "skip_nonfinite": skip_nonfinite,
            "state_dtype": state_dtype,
            "precondition": precondition,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "capturable": capturable,
            "fused": fused,
            "training": True,
        }
        defaults = options.in_steps(options.completed(given), steps_per_epoch)
        defaults = options.plain(defaults)
        options.check_group(defaults)
        self.process_group = process_group
        self._made_for = []
        super().__init__(params, defaults)
        if process_group is None and not any(group["params"] for group in self.param_groups):
            raise ValueError("params must hold at least one parameter, got none")

    _opt_called = traced.Called()

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also in mid-training: they join the clock, with m = 0 and v = w."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        group = options.plain(param_group)
        if not isinstance(group["params"], Tensor | set):  # torch refuses sets itself
            group["params"] = list(group["params"])
            taken = {n for known in self.param_groups for n in known.get("param_names", ())}
            options.check_parameters(group["params"], taken)
        current = {"training": self.training} if self.param_groups else {}
        merged = {**self.defaults, **group, **current}
        options.check_group(merged)
        options.check_agreement([*self.param_groups[:1], merged])
        super().add_param_group({**group, **current})
        self._capture_lr(self.param_groups[-1])
        self._made_for.append(self.param_groups[-1]["precondition"])
        try:
            self._settle_in()
            self._create_states(len(self.param_groups) - 1)
        except (RuntimeError, ValueError):  # no kernel for these parameters, or no P
            self._made_for.pop()
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            if self.param_groups:
                self._settle_in()
            raise

    @staticmethod
    def _capture_lr(group: dict[str, Any]) -> None:
        """A captured graph reads the learning rate from the device; schedulers write it there."""
        if group["capturable"] and group["params"]:
            group["lr"] = torch.as_tensor(
                group["lr"], dtype=torch.float64, device=group["params"][0].device
            )

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @traced.unwrapped
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure`, if given, re-evaluates the model and returns the loss."""
        if torch.compiler.is_compiling():
            return self._traced_step(closure)
        self._refuse_evaluation_mode()
        self._refuse_backward()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._refuse_evaluation_mode()  # which the closure may have entered
        with torch.set_grad_enabled(self.param_groups[0]["differentiable"]):
            self._step()
        return loss

    def _refuse_evaluation_mode(self) -> None:
        if not self.training:
            raise RuntimeError(traced.EVALUATION_MODE)

    def _refuse_backward(self) -> None:
        first: Any = next((p for group in self.param_groups for p in group["params"]), None)
        if self in getattr(first, "_in_backward_optimizers", ()):
            raise RuntimeError(
                "Neumann cannot step one parameter at a time inside backward: r is the distance of "
                "all parameters from their average, and the clock is one for all of them, so a "
                "step needs every gradient. Build one Neumann for all parameters and call its "
                "step() after backward() instead of _apply_optimizer_in_backward"
            )

    @torch._disable_dynamo  # type: ignore[attr-defined]  # for a trace that was refused
    def _step(self) -> None:
        groups = self.param_groups
        options.check_agreement(groups)
        for group in groups:
            options.check_moving(group)
        self._tie()
        gathered = [self._gather(index) for index in range(len(groups))]
        self._follow_preconditioners(gathered)
        forces = has_forces(groups[0])
        weights = [w for found in gathered for w in found.weights] if forces else []
        self._watch.look(weights, self._name_of)
        found_inf = self._overflow(gathered)
        if found_inf is not None and not self._on_device and bool(found_inf):
            return
        gathered, scale = self._precondition(gathered, found_inf)
        works = self._works(gathered)
        clock, before = self._scalars[CLOCK], self._scalars[DISTANCE]
        after = before if self._shards is None else self._shards.sums
        self._execution.step(works, self._shared(), clock, before, after, scale, found_inf)
        self._watch.leave(weights)

    def _traced_step(self, closure: Callable[[], float] | None) -> float | None:
        """The step as a tracer sees it."""
        traced.refuse(self.param_groups, self.state, sharded=self._shards is not None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            gathered = [self._gather(index) for index in range(len(self.param_groups))]
            found_inf = self._overflow(gathered)
            gathered, scale = self._precondition(gathered, found_inf)
            works = self._works(gathered)
            clock, squared = self._scalars[CLOCK], self._scalars[DISTANCE]
            self._execution.settle(squared)
            traced.step(works, self._shared(), clock, squared, scale, found_inf)
        self._watch.leave([])  # versions are not known before the graph has run
        return loss

    def reset_average(self) -> None:
        """Start the moving average anew at the present weights: v = w, r = 0."""
        for _, state in self._states():
            if OFFSET in state:
                local(state[OFFSET]).zero_()
        self._forget_distance()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and skipping to step(): a kernel does both."""
        return self._on_device or self._execution.implementation is Implementation.CPU

    # ------------------------------------------------------------------ looking in

    @torch.no_grad()
    def diagnostics(self) -> Diagnostics:
        """Phase, t, distance, steps to the next reset; per group μ, η and the two forces."""
        first = self.param_groups[0]
        self._tie()
        self._settle()
        squared = self._scalars[DISTANCE].detach().clone()
        variables = self._count_variables()
        groups = []
        for group, momentum in zip(self.param_groups, self._momenta, strict=True):
            lr = group["lr"]
            groups.append(
                GroupDiagnostics(
                    lr.detach().clone() if isinstance(lr, Tensor) else lr,
                    momentum.clone(),
                    squared,
                    first["cubic"],
                    first["repulsive"] * variables,
                    first["average"],
                    first["bounded"],
                )
            )
        return Diagnostics(
            tuple(groups),
            self._timetable(),
            self._scalars[CLOCK].clone(),
            self._scalars[SKIPPED].clone(),
            squared,
        )

    def __repr__(self) -> str:
        first = self.param_groups[0]
        step = int(self._scalars[CLOCK])
        phase, t = self._timetable().place(step)
        shared = ", ".join(f"{name}={first[name]!r}" for name in options.SHARED)
        lines = [f"Neumann(step={step}, phase={phase.value!r}, t={t}, {shared}"]
        for index, group in enumerate(self.param_groups):
            weights = sum(p.numel() for p in group["params"])
            own = ", ".join(f"{name}={group[name]!r}" for name in options.OWN)
            lines.append(
                f"  group {index}: {len(group['params'])} tensors, {weights:,} weights, {own}"
            )
        return "\n".join(lines) + "\n)"
