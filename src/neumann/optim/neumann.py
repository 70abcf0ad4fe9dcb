"""The Neumann optimizer: Algorithm 2 of Krishnan, Xiao and Saurous (2017), as a torch.optim class.

The parameters hold the displaced weights w while training; the weights to evaluate and to ship are
w − μm. The class keeps the contract of torch.optim (groups, state, modes, checkpoints) and gathers
lists; when what happens is in `phases`, the force in `distance`, the arithmetic in `update`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from neumann.optim import checkpoint, options, update
from neumann.optim.checkpoint import (
    CLOCK,
    DISTANCE,
    ITERATE,
    MOMENTUM,
    OFFSET,
    SKIPPED,
    WEIGHTS,
)
from neumann.optim.diagnostics import Diagnostics, GroupDiagnostics
from neumann.optim.distance import distance_squared, force, scalar_dtype
from neumann.optim.evaluation import TwoWeights
from neumann.optim.phases import Phase, Timetable, momentum_at, row

_timetable = lru_cache(maxsize=64)(Timetable)


class Neumann(TwoWeights):
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
            momentum and weight decay.
        lr: the learning rate η, a float or a 0-d tensor. The only thing to tune; values that suit
            Nesterov SGD with momentum 0.9 are the place to start.
        steps_per_epoch: optimizer steps (not micro-batches) an epoch; turns the epoch counts below
            into steps, rounded half up.
        warmup_epochs: length of the SGD warm-up.
        reset_epochs: first interval K between resets.
        warmup_steps: the warm-up in steps; wins over `warmup_epochs`.
        reset_steps: K in steps; wins over `reset_epochs`. 0: no reset after the one at t = 1.
        reset_growth: the interval grows by this factor after each reset (1.0 is the printed
            algorithm, t = 1 mod K).
        momentum: the peak of μ(t) = 1 − 1/(1 + t). Schedulers may change it.
        cubic: α, the strength of the attraction.
        repulsive: β per variable, the strength of the repulsion.
        average: γ of the moving average.
        variables: what the paper's "num variables" counts: "tensors" or "elements" of the
            parameters that require gradients, or the count itself.
        bounded: keep the repulsion from exploding close to the average.
        weight_decay: λ, added to the gradient as λw unless decoupled.
        decoupled_weight_decay: subtract ηλw from the weights instead.
        skip_nonfinite: leave everything untouched, the clock included, when any gradient is not
            finite. Costs one host synchronisation a step on an accelerator.
        state_dtype: None in this version.
        precondition: None in this version.
        maximize: maximize the objective instead.
        foreach: use the multi-tensor form; None chooses it. False is the single-tensor form.
        differentiable: let autograd record the step (single-tensor form).
        capturable: not built yet.
        fused: not built yet.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        steps_per_epoch: float | None = None,
        warmup_epochs: float = 5,
        reset_epochs: float = 10,
        warmup_steps: int | None = None,
        reset_steps: int | None = None,
        reset_growth: float = 2.0,
        momentum: float = 0.9,
        cubic: float = 1e-7,
        repulsive: float = 1e-5,
        average: float = 0.99,
        variables: str | int = "tensors",
        bounded: bool = True,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None,
        precondition: None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        warmup, interval = options.resolve_steps(
            steps_per_epoch, warmup_epochs, reset_epochs, warmup_steps, reset_steps
        )
        defaults: dict[str, Any] = {
            "lr": lr,
            "warmup_steps": warmup,
            "reset_steps": interval,
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
        options.check_group(defaults)
        self._scalars: dict[str, Tensor] = {}  # one for the optimizer: clock, r², skipped steps
        self._momenta: list[Tensor] = []  # one for each group: μ of the last completed step
        super().__init__(params, defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("params must hold at least one parameter, got none")

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also in mid-training: they join the clock, with m = 0 and v = w."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        group = dict(param_group)
        entries = group["params"]
        if not isinstance(entries, Tensor | set):  # torch refuses sets itself
            group["params"] = entries = list(entries)
            parameters = [e[1] if isinstance(e, tuple) else e for e in entries]
            if len({id(p) for p in parameters}) != len(parameters):
                raise ValueError("params holds the same parameter twice in one group")
        current = {} if not self.param_groups else {"training": self.training}
        merged = {**self.defaults, **group, **current}
        options.check_group(merged)
        options.check_agreement([*self.param_groups[:1], merged])
        super().add_param_group({**group, **current})
        self._tie_scalars()
        self._create_state(len(self.param_groups) - 1)

    def _create_state(self, index: int) -> None:
        """State for those parameters of a group that need some and have none.

        Made before the first step, because torch's distributed checkpoints would otherwise call
        step() to have it made, and the clock would tick. Frozen parameters wait until they have a
        gradient: they may be most of the model.
        """
        group = self.param_groups[index]
        for p in group["params"]:
            if p in self.state or not (p.requires_grad or p.grad is not None):
                continue
            state = self.state[p]
            state.update(self._scalars)
            state[MOMENTUM] = self._momenta[index]
            state[ITERATE] = torch.zeros_like(p, requires_grad=False)
            if has_forces(group):
                state[OFFSET] = torch.zeros_like(p, requires_grad=False)
            if not group["training"]:
                state[WEIGHTS] = p.detach().clone()

    def _tie_scalars(self) -> None:
        """Make the scalars that the parameters' states repeat one tensor again, after a load."""
        grouped = [
            [self.state[p] for p in group["params"] if p in self.state]
            for group in self.param_groups
        ]
        states = [state for group in grouped for state in group]
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device if parameters else torch.device("cpu")

        def one(key: str, among: list[dict[str, Any]], default: float) -> Tensor:
            dtype = torch.int64 if key in (CLOCK, SKIPPED) else torch.float64
            found = next((state[key] for state in among if key in state), None)
            tensor = torch.tensor(default, dtype=dtype) if found is None else found
            if key == DISTANCE:
                tensor = tensor.to(device, scalar_dtype(device))
            for state in among:
                state[key] = tensor
            return tensor

        measured = any(DISTANCE in state for state in states)
        self._scalars = {key: one(key, states, 0) for key in (CLOCK, SKIPPED, DISTANCE)}
        t = self._timetable().place(int(self._clock)).t if self.param_groups else 0
        self._momenta = [
            one(MOMENTUM, among, momentum_at(t, group["momentum"]))
            for group, among in zip(self.param_groups, grouped, strict=True)
        ]
        if not measured:
            self._measure_distance()

    @property
    def _clock(self) -> Tensor:
        return self._scalars[CLOCK]

    def _names(self) -> dict[Tensor, str]:
        """What to call each parameter in a message."""
        names = {}
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                given = group.get("param_names")
                names[p] = given[i] if given else f"parameter {i} of group {g}"
        return names

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure`, if given, re-evaluates the model and returns the loss."""
        if not self.training:
            raise RuntimeError(
                "step() in evaluation mode would update the wrong weights: call optimizer.train() "
                "first"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.param_groups[0]["differentiable"]):
            self._step()
        return loss

    def _step(self) -> None:
        groups = self.param_groups
        options.check_agreement(groups)
        for group in groups:
            options.check_moving(group)
        gathered = [self._gather(index) for index in range(len(groups))]
        first = groups[0]
        if first["skip_nonfinite"] and not update.all_finite(
            [g for tensors in gathered for g in tensors.gradients]
        ):
            self._scalars[SKIPPED].add_(1)
            return

        self._clock.add_(1)
        phase, t = self._timetable().place(int(self._clock))
        forces = has_forces(first)
        iterating = forces and phase is Phase.ITERATE
        distance = self._scalars[DISTANCE].sqrt() if iterating else None
        repulsive = first["repulsive"] * self._count_variables() if iterating else 0.0
        for index, (group, tensors) in enumerate(zip(groups, gathered, strict=True)):
            if not group["params"]:
                continue
            single = group["differentiable"] or group["foreach"] is False
            lr = group["lr"] if group["differentiable"] else float(group["lr"])
            momentum = momentum_at(t, group["momentum"])
            decay = group["weight_decay"]
            decoupled = group["decoupled_weight_decay"]
            c = None
            if distance is not None:
                c = force(
                    distance,
                    lr,
                    momentum,
                    group["average"],
                    group["cubic"],
                    repulsive,
                    group["bounded"],
                )
            update.apply(
                tensors,
                row(phase, lr, momentum, group["average"], decay if decoupled else 0.0),
                c,
                update.update_single if single else update.update_foreach,
                weight_decay=0.0 if decoupled else decay,
                maximize=group["maximize"],
            )
            self._momenta[index].fill_(momentum)
            if phase is Phase.RESET:
                for p in group["params"]:
                    if p.grad is None and p in self.state:
                        self.state[p][ITERATE].zero_()
        if forces:
            self._measure_distance()

    def _gather(self, index: int) -> update.Tensors:
        """The group's tensors that a step works on; changes nothing that a step would."""
        group = self.param_groups[index]
        forces = has_forces(group)
        tensors = update.Tensors(offsets=[] if forces else None)
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"Neumann does not support sparse gradients, and {self._names()[p]} has one: "
                    "give that parameter to torch.optim.SparseAdam, or build its layer with "
                    "sparse=False"
                )
        self._create_state(index)
        for p in group["params"]:
            state = self.state.get(p)
            if state is None:
                continue
            # Without forces there is no average; when they come back it starts at the weights.
            if not forces:
                state.pop(OFFSET, None)
            elif OFFSET not in state:
                state[OFFSET] = torch.zeros_like(p, requires_grad=False)
            if p.grad is None:
                continue
            tensors.weights.append(p)
            tensors.gradients.append(p.grad)
            tensors.iterates.append(state[ITERATE])
            if tensors.offsets is not None:
                tensors.offsets.append(state[OFFSET])
        return tensors

    def _timetable(self) -> Timetable:
        first = self.param_groups[0]
        return _timetable(first["warmup_steps"], first["reset_steps"], first["reset_growth"])

    def _count_variables(self) -> int:
        variables = self.param_groups[0]["variables"]
        if not isinstance(variables, str):
            return int(variables)
        counted = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return len(counted) if variables == "tensors" else sum(p.numel() for p in counted)

    def _measure_distance(self) -> None:
        """Sum r² for the next step; saved with the state, so that a resumed run has its bits."""
        states = (self.state[p] for g in self.param_groups for p in g["params"] if p in self.state)
        offsets = [state[OFFSET] for state in states if OFFSET in state]
        if torch.is_grad_enabled():
            offsets = [offset.clone() for offset in offsets]  # the next step writes the originals
        scalar = self._scalars[DISTANCE]
        scalar.copy_(distance_squared(offsets, scalar.device))

    # ------------------------------------------------------------------ looking in

    @torch.no_grad()
    def diagnostics(self) -> Diagnostics:
        """Phase, t, distance, steps to the next reset; per group μ, η and the two forces."""
        first = self.param_groups[0]
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
            self._clock.clone(),
            self._scalars[SKIPPED].clone(),
            squared,
        )

    # ------------------------------------------------------------------ copies and checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt state, hyperparameters and mode. Parameters are never written.

        Load the model's weights before or after, saved in the same mode as the state dict.
        """

        def prepare(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            checkpoint.check_fits(self.param_groups, self._names(), loaded)
            return checkpoint.wrap(loaded)

        # A hook registered now runs after the user's own, so it sees what they made of the dict.
        handle = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # a key that an older state dict does not have
        for p, entry in self.state.items():
            for key, value in entry.items():
                entry[key] = checkpoint.unwrap(value, key, p)
            entry.setdefault(ITERATE, torch.zeros_like(p, requires_grad=False))
        self._tie_scalars()
        for index in range(len(self.param_groups)):
            self._create_state(index)

    def __repr__(self) -> str:
        first = self.param_groups[0]
        step = int(self._clock)
        phase, t = self._timetable().place(step)
        shared = ", ".join(f"{name}={first[name]!r}" for name in options.SHARED)
        lines = [f"Neumann(step={step}, phase={phase.value!r}, t={t}, {shared}"]
        for index, group in enumerate(self.param_groups):
            weights = sum(p.numel() for p in group["params"])
            own = ", ".join(
                f"{name}={group[name]!r}"
                for name in ("lr", "momentum", "weight_decay", "decoupled_weight_decay", "maximize")
            )
            lines.append(
                f"  group {index}: {len(group['params'])} tensors, {weights:,} weights, {own}"
            )
        return "\n".join(lines) + "\n)"


def has_forces(group: dict[str, Any]) -> bool:
    """Whether the average is needed at all."""
    return bool(group["cubic"] or group["repulsive"])
