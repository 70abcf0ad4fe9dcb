"""The Neumann optimizer: Algorithm 2 of Krishnan, Xiao and Saurous (2017), as a torch.optim class.

While training, the parameters hold the displaced weights w; the weights to evaluate and to ship are
w − μm. The class keeps the contract of torch.optim. It holds a state store (`state`), a backend
that carries out the update (`backends`) and, if parameters are spread over processes, their
sharding (`distributed`). What happens when is in `phases`, the force in `distance`, the arithmetic
in `update`.

A gradient travels p.grad → `StateStore.gather` → the preconditioner → the backend → p.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from neumann.caller_warnings import warn_caller
from neumann.optim import checkpoint, misuse, modes, option_checks, options, tracing
from neumann.optim.backends import Backend, Scalars, choose_backend
from neumann.optim.backends.traced import step_traced
from neumann.optim.defaults import (
    add_usual_options,
    find_explicit,
    make_defaults,
    refuse_mixed_group,
    refuse_plain_group,
)
from neumann.optim.diagnostics import Diagnostics, describe, diagnose
from neumann.optim.distance_tracker import DistanceTracker
from neumann.optim.distributed import (
    Sharding,
    SharedGroup,
    find_sharding,
    require_group,
    reshard_models,
)
from neumann.optim.dtensor import local_part
from neumann.optim.interrupts import run_uninterrupted, run_with_grad_mode
from neumann.optim.options import keeps_average
from neumann.optim.preconditioners import Preconditioner, memory
from neumann.optim.preconditioners.apply import precondition
from neumann.optim.preconditioners.captured import CapturedPreconditioner
from neumann.optim.preconditioners.exchange import Exchange, find_exchange
from neumann.optim.skipping import agree_on_skipping
from neumann.optim.state import CLOCK, DISTANCE, OFFSET, WEIGHTS, StateStore
from neumann.optim.tensors import Tensors
from neumann.optim.write_watch import WriteWatch


class Neumann(Optimizer):
    """The Neumann optimizer: by default the paper's Algorithm 2.

    For large batches, use :func:`neumann.large_batch`, or `precondition="spectral"`.

    The warm-up is plain SGD. After it, each step adds a term to a Neumann series for the inverse
    Hessian applied to the gradient. A cubic term attracts the weights to their moving average, a
    repulsive term pushes them away from it, and resets start the series again. The equations are
    in :mod:`neumann.optim.update`.

    During training the parameters hold the displaced weights w. Evaluate and save w − μm: call
    :meth:`eval` before you evaluate and :meth:`train` before you continue, or use
    :meth:`evaluating` as a context manager.

    Args:
        params: parameters, named parameters or groups, as in torch.optim. Groups may differ in lr,
            momentum, weight decay, precondition and maximize.
        lr: the learning rate η, a float or a 0-d tensor. It is the first option to tune. Start
            with a value that suits Nesterov SGD with momentum 0.9, or with 0.015 for the spectral
            preconditioner and 0.0025 for the diagonal one.
        steps_per_epoch: optimizer steps (not micro-batches) per epoch. With it, the lengths below
            can be given in epochs; they are rounded to steps, half a step up.
        warmup_epochs: length of the SGD warm-up. Default: 5, or 0 with a preconditioner.
        reset_epochs: first interval K between resets. Default: 10, or 0 with a preconditioner.
        warmup_steps: the warm-up in steps; overrides `warmup_epochs`.
        reset_steps: K in steps; overrides `reset_epochs`. 0: no reset after the one at t = 1.
        reset_growth: the interval grows by this factor after each reset (1.0 is the paper's
            algorithm, t = 1 mod K).
        momentum: the upper limit in μ(t) = min(momentum, 1 − 1/(1 + t)). Schedulers may change it.
            Default: 0.9, or 0.6 with a preconditioner that has its own momentum ("spectral").
        cubic: α, the strength of the attraction. Default: 1e-7, or 0 with a preconditioner.
        repulsive: β per variable, the strength of the repulsion. Default: 1e-5, or 0 with a
            preconditioner.
        average: γ, the decay per step of the moving average.
        variables: what the paper's "num variables" counts: "tensors" or "elements" of the
            parameters that require gradients, or the count itself.
        bounded: limit the repulsion where the weights are close to the average. In the paper's
            formula it goes to infinity there.
        weight_decay: λ, added to the gradient as λw unless decoupled.
        decoupled_weight_decay: subtract ηλw from the weights instead. Default: only with a
            preconditioner.
        skip_nonfinite: if any gradient is not finite, skip the step: it changes nothing and is
            not counted. Costs one host synchronization per step on an accelerator.
        state_dtype: the dtype of m and δ; None is each parameter's own. torch.bfloat16 takes half
            the memory of float32, and is rounded stochastically. So is P's momentum, which is in
            bfloat16 too; P's mean of squares stays in float32.
        precondition: P, which turns gradients into the directions that the series sums: None (the
            paper), "diagonal", "spectral" or a :class:`Preconditioner`. Groups may differ in it.
            Momentum and the form of weight decay follow each group's own P; warm-up, resets and
            forces follow this argument, or the groups' P if all of them have one.
        maximize: maximize the objective instead.
        foreach: use the multi-tensor form; None chooses for you. False is the single-tensor form.
        differentiable: let autograd record the step (single-tensor form).
        capturable: let a CUDA graph capture the step; the learning rate becomes a tensor on the
            device. If you do not capture the step, the optimizer captures P by itself after a few
            steps, where it can. Needs the fused CUDA kernel.
        fused: one pass over memory, in Triton on CUDA and in numba on the CPU (extra `cpu`). None
            uses it if it can run. If it cannot, True raises an error that says why.
        process_group: the torch.distributed group over which whole parameters are distributed, as
            in ZeRO and pipeline stages; r is then the distance over all of them. DTensors (FSDP2)
            carry their group, and replicas (DDP) need none. With `distributed=`, the processes of
            the group are replicas, which have all parameters whole.
        distributed: which process applies P to a matrix that several processes have, in shards or
            as replicas. "owner": one process, which sends the others their part of the direction;
            P must treat each matrix independently. "replicated": every process applies P to every
            matrix. None is "owner" for DTensors, "replicated" otherwise.
    """

    _opt_called = tracing.HasStepped()  # read by torch's schedulers
    _checkpointing = False  # inside a `checkpointing` block
    _constructing = False  # the groups are still those given to the constructor
    _explicit: frozenset[str] = frozenset()  # options that the user gave, by name
    _cut_short = False  # the update of the last step failed on the way
    _warned_of_momentum = False  # whether a step has found a scheduler that cycles it
    _warned_of_gradients = False  # whether a step has found no gradient at all
    _switching = False  # between the modes: `train` or `eval` was cut short
    distributed: Literal["owner", "replicated"] | None = None  # also of pickles that lack it

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
        distributed: Literal["owner", "replicated"] | None = None,
    ) -> None:
        given = dict(locals())  # every option, by name
        for name in ("self", "params", "process_group", "distributed", "__class__"):
            del given[name]
        # A single tensor stays one: torch refuses it with its own message.
        entries: Any = params if isinstance(params, Tensor) else list(params)
        groups = [entry for entry in entries if isinstance(entry, dict)]
        defaults = make_defaults(given, groups)
        self._explicit = find_explicit(given)
        require_group(process_group)
        self.process_group, self.distributed = process_group, distributed
        self._store, self._watch = StateStore(), WriteWatch()
        # Set by `_rebuild`, which super().__init__ reaches through `add_param_group`.
        self._backend: Backend
        self._sharding: Sharding | None  # None: this process has every parameter whole
        self._exchange: Exchange | None  # None: every process applies P to all it has
        self._distance: DistanceTracker
        self._constructing, self._cut_short = True, False
        super().__init__(entries, defaults)
        self._constructing = False
        if self._divided_among() is None and not any(
            group["params"] for group in self.param_groups
        ):
            raise ValueError("params must hold at least one parameter, got none")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also during training. They start with m = 0 and v = w.

        Args:
            param_group: a dict with `params` and any of the options in which groups may differ.

        Raises:
            ValueError: an option is wrong, or differs where all groups must agree.
            RuntimeError: this optimizer cannot train the parameters. In both cases nothing is
                added.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        group = options.to_plain(param_group)
        add_usual_options(group, self._explicit)
        if not isinstance(group["params"], Tensor | set):  # torch refuses sets itself
            group["params"] = list(group["params"])
            taken = {n for known in self.param_groups for n in known.get("param_names", ())}
            option_checks.check_parameters(group["params"], taken)
        current: dict[str, Any] = {}
        if self.param_groups:
            current = {"training": self.training}
            if not self._constructing:  # a load or the user may have changed what all share
                group = {**{name: self.param_groups[0][name] for name in options.COMMON}, **group}
        merged = {**self.defaults, **group, **current}
        if self.param_groups and not self._constructing:
            refuse_plain_group(group, merged, self.param_groups)
            refuse_mixed_group(merged, self.param_groups, self._explicit)
        option_checks.check_group(merged)
        option_checks.check_agreement([*self.param_groups[:1], merged])
        super().add_param_group({**group, **current})
        options.make_lr_capturable(self.param_groups[-1])
        self._store.made_for.append(self.param_groups[-1]["precondition"])
        try:
            self._rebuild()
            self._store.create_missing()
        except (RuntimeError, ValueError):  # no kernel for these parameters, or a bad P
            self._store.made_for.pop()
            for p in self.param_groups.pop()["params"]:
                self.state.pop(p, None)
            if self.param_groups:
                self._rebuild()
            raise

    def _rebuild(self) -> None:
        """After groups or state have changed: find the sharding, choose a backend, tie scalars."""
        store = self._store
        store.bind(self.param_groups, self.state)
        if store.scalars:
            self._distance.finish()  # what the last step left pending
        sharding, backend = self._find_backend(self.param_groups[0])
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._exchange = find_exchange(parameters, self.distributed, self.process_group)
        device = parameters[0].device if parameters else torch.device("cpu")
        self._backend, self._sharding = backend(device), sharding
        self._captured = CapturedPreconditioner()
        self._distance = DistanceTracker(store, self._backend, sharding)
        self._watch.forget_versions()
        tracing.treat_reset_table_as_constant()
        self._distance.start(is_known=store.tie_scalars(device, backend.on_device))

    def _divided_among(self) -> Any:
        """The process group among which whole parameters are divided, if there is one."""
        return self.process_group if self.distributed is None else None

    def _find_replicas(self) -> Any:
        """The process group whose processes have copies of the parameters, if it was named."""
        return None if self.distributed is None else self.process_group

    def _find_backend(self, group: Any) -> tuple[Sharding | None, type[Backend]]:
        """How the parameters are spread, and the backend that these options of a group ask for."""
        parameters = [p for each in self.param_groups for p in each["params"]]
        sharding = find_sharding(parameters, self._divided_among())
        if sharding is not None and group["differentiable"]:
            raise RuntimeError("differentiable=True cannot run here: the parameters are sharded")
        devices = {p.device for p in parameters}
        sums = 1 if sharding is None else len(sharding.sums)
        return sharding, choose_backend(group, devices, sums)

    def _reconcile(self) -> None:
        """Catch up with changes made directly to `param_groups` and `state`.

        Accelerate replaces parameters, Lightning moves state, ZeroRedundancyOptimizer swaps it.
        """
        store = self._store
        store.bind(self.param_groups, self.state)
        if store.has_replaced_parameters():
            self._adopt_parameters()
        if store.has_foreign_clock():
            store.scalars = {}
            self._rebuild()
        else:
            store.repair_scalars()

    def _adopt_parameters(self) -> None:
        """Rebuild after parameters were replaced, materialized or unfrozen."""
        self._store.drop_replaced()
        self._rebuild()
        self._store.create_missing()

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @tracing.without_scheduler_wrapper
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure`, if given, re-evaluates the model and returns the loss.

        A parameter without a gradient keeps w, m, δ and the state of P: it has no update and no
        decay. The clock advances, its δ still counts in r, and a reset sets its m to 0, as does
        freezing it. A parameter that never had a gradient and requires none has no state.

        A step can raise before its update begins, because of bad options, a sparse gradient, an
        error in the closure or in P, or too little memory. Weights, m, δ, the clock and the count
        of skipped steps are then as before; only the state of P may already contain the gradient.
        Ctrl-C and SIGTERM wait for the end of an update. If the update itself fails, on a broken
        device for example, some weights have moved and others have not. Then `step`, `train`,
        `eval` and `state_dict` raise until a checkpoint is loaded.
        """
        traced = torch.compiler.is_compiling()
        self._refuse_cut_short()
        if traced:
            sharded = self._sharding is not None
            tracing.refuse_untraceable(self.param_groups, self.state, sharded=sharded)
        else:
            self._refuse_evaluation_mode()
            misuse.refuse_backward(self, self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if not traced:
                self._refuse_evaluation_mode()  # the closure may have entered it
        if traced:
            with torch.no_grad():
                self._traced_step()
        else:
            run_with_grad_mode(self.param_groups[0]["differentiable"], self._step)
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]  # for a trace that was refused
    def _step(self) -> None:
        option_checks.check_agreement(self.param_groups)
        for group in self.param_groups:
            option_checks.check_scheduled(group)
        if not self._warned_of_momentum:
            self._warned_of_momentum = misuse.warn_of_cycled_momentum(self.param_groups)
        self._reconcile()
        store = self._store
        groups = gathered = self._gather()
        if not self._warned_of_gradients:
            gradients = [group.gradients for group in groups]
            self._warned_of_gradients = misuse.warn_of_missing_gradients(gradients)
        store.follow_preconditioners(groups)
        watched = keeps_average(self.param_groups[0])
        weights = [w for group in groups for w in group.weights] if watched else []
        self._watch.compare(weights, store.name_of)
        found_inf, counted = self._agree_on_skipping(groups)
        if found_inf is not None and not self._backend.on_device and bool(found_inf):
            store.count_skipped(counted)
            return
        # On the host nothing is left to skip.
        skip = found_inf if self._backend.on_device else None
        grad_scale = getattr(self, "grad_scale", None)
        groups, grad_scale = self._precondition(groups, grad_scale, skip)
        sums = r_squared = store.scalars[DISTANCE]
        if self._sharding is not None:
            groups, sums = self._sharding.split(groups), self._sharding.sums
        scalars = Scalars(store.scalars[CLOCK], r_squared, sums, grad_scale, found_inf)
        update = self._backend.prepare(
            groups, store.step_options(self._distance.variables), scalars
        )

        def write() -> None:
            self._cut_short = True
            store.count_skipped(counted)
            update()
            store.end_frozen(gathered)
            if store.drop_averages(groups):
                self._distance.forget()
            self._watch.remember(weights)
            self._cut_short = False

        run_uninterrupted(write)

    def _precondition(
        self, groups: list[Tensors], grad_scale: Tensor | None, skip: Tensor | None
    ) -> tuple[list[Tensors], Tensor | None]:
        """Apply P, in a CUDA graph of its own if the step is capturable."""
        divided = self._exchange is not None or self._sharding is not None
        if self.param_groups[0]["capturable"] and not divided:
            return self._captured.precondition(groups, grad_scale, skip)
        return precondition(groups, grad_scale, skip, self._exchange)

    def _traced_step(self) -> None:
        """The step as a tracer sees it."""
        store = self._store
        groups = self._gather()
        found_inf, counted = self._agree_on_skipping(groups)
        store.count_skipped(counted)
        if store.drop_averages(groups):
            self._distance.forget()
        groups, grad_scale = precondition(groups, getattr(self, "grad_scale", None), found_inf)
        squared = store.scalars[DISTANCE]
        self._backend.finish_distance(squared)
        scalars = Scalars(store.scalars[CLOCK], squared, squared, grad_scale, found_inf)
        step_traced(groups, store.step_options(self._distance.variables), scalars)
        store.end_frozen(groups)
        self._watch.remember([])  # versions are unknown before the graph has run

    def _gather(self) -> list[Tensors]:
        """The tensors of every group."""
        sharded = self._sharding is not None
        return self._store.gather(sharded=sharded, on_new_parameters=self._adopt_parameters)

    def _agree_on_skipping(self, groups: list[Tensors]) -> tuple[Tensor | None, Tensor | None]:
        """See `skipping`; with sharded parameters this also brings r² up to date."""
        found = getattr(self, "found_inf", None)  # set by torch.amp.GradScaler
        sharding = self._sharding
        reduce = None if sharding is None else partial(self._distance.reduce, sharding, groups)
        return agree_on_skipping(groups, self._store, found, reduce, self._find_replicas())

    def _refuse_evaluation_mode(self) -> None:
        if not self.training:
            raise RuntimeError(tracing.EVALUATION_MODE)

    def _refuse_cut_short(self) -> None:
        if self._cut_short:
            raise RuntimeError(
                "the last step was cut short, so only part of the weights and state is updated: "
                "load a checkpoint of the model and of the optimizer"
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and skipping to step().

        It must where processes decide together: it would skip the call on one of them alone, and
        the others would wait.
        """
        together = self._sharding is not None or self._find_replicas() is not None
        return self._backend.unscales or together

    # ------------------------------------------------------------------ training and evaluation

    @property
    def training(self) -> bool:
        """Whether the parameters hold w (training) or w − μm (evaluation).

        A saved copy of w counts too: ZeroRedundancyOptimizer overwrites the flag in the groups.
        """
        self._store.bind(self.param_groups, self.state)
        _, state = next(self._store.entries(), (None, {}))
        return bool(self.param_groups[0]["training"]) and WEIGHTS not in state

    def train(self, mode: bool = True) -> Self:
        """Put the training weights w back into the parameters, without rounding errors.

        A second call changes nothing. After an interrupt or an error, all parameters hold w. If
        that repair is interrupted too, `training` is False, w is in the state, and the next call
        of `train` or `eval` finishes the switch.
        """
        self._refuse_cut_short()
        if mode != self.training or self._switching:
            run_with_grad_mode(False, partial(self._switch, mode))
        return self

    def _switch(self, mode: bool) -> None:
        self._reconcile()
        entries = list(self._store.entries())
        warning = self._watch.judge_load(mode, entries, self.holds_displaced_weights)
        try:
            self._switching = True
            if mode:
                self._show_training_weights(entries)
            else:
                modes.switch_to_evaluation(self.param_groups, entries)
                self._reshard()
            self._switching = False
        except BaseException:
            self._show_training_weights(entries)
            self._switching = False
            raise
        if warning:
            warn_caller(warning)

    def note_loaded_weights(self) -> None:
        """For :func:`neumann.guard`: the model has loaded weights, perhaps not with this state."""
        self._watch.note_load()

    def _show_training_weights(self, entries: modes.Entries) -> None:
        modes.switch_to_training(self.param_groups, entries)
        self._watch.remember()
        self._reshard()

    def _reshard(self) -> None:
        if self._sharding is not None:
            reshard_models()

    def eval(self) -> Self:
        """Put the evaluation weights w − μm into the parameters; w is kept until :meth:`train`."""
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[Self]:
        """Hold the evaluation weights inside a block; afterwards the mode is what it was before."""
        before = self.training
        try:
            try:
                self.eval()
                yield self
            finally:
                self.train(before)
        except BaseException:  # an interrupt may have come before `train` began its work
            self.train(before)
            raise

    @contextmanager
    def checkpointing(self) -> Iterator[Self]:
        """Declare that a state dict of the model taken in this block is meant to resume the run.

        The only effect is that :func:`neumann.guard` does not warn.
        """
        before, self._checkpointing = self._checkpointing, True
        try:
            yield self
        finally:
            self._checkpointing = before

    def holds_displaced_weights(self) -> bool:
        """Whether the parameters hold w, w − μm differs, and no `checkpointing` block is active."""
        displaced = int(self._store.scalars[CLOCK]) > self.param_groups[0]["warmup_steps"]
        return displaced and self.training and not self._checkpointing

    def reset_average(self) -> None:
        """Restart the moving average at the current weights: v = w, r = 0."""
        for _, state in self._store.entries():
            if OFFSET in state:
                local_part(state[OFFSET]).zero_()
        self._distance.forget()

    @torch.no_grad()
    def eval_params(self) -> dict[str, Tensor] | list[Tensor]:
        """Copies of the evaluation weights w − μm, by name if the parameters have names.

        The model does not change; use the copies with :func:`torch.func.functional_call`. Copies of
        sharded parameters are sharded in the same way.
        """
        self._reconcile()
        return modes.derive_params(self.param_groups, self.state, modes.compute_evaluation)

    @torch.no_grad()
    def average_params(self) -> dict[str, Tensor] | list[Tensor]:
        """Copies of the moving average v of the weights, in the form of :meth:`eval_params`."""
        if not keeps_average(self.param_groups[0]):
            raise RuntimeError(
                "the average is kept only for a force: set cubic or repulsive above 0"
            )
        self._reconcile()
        return modes.derive_params(self.param_groups, self.state, modes.compute_average)

    # ------------------------------------------------------------------ state dicts and copies

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with all that a resumed run needs to continue bit for bit."""
        self._refuse_cut_short()
        self._reconcile()
        self._distance.finish()
        state_dict = super().state_dict()
        memory.write_names(state_dict["param_groups"])
        if self._sharding is not None:
            # Between steps a process has only its own shards' part of the new r², which other
            # shards cannot use. NaN tells the loader to measure it again.
            unknown = torch.full_like(self._store.scalars[DISTANCE], torch.nan)
            for index, state in state_dict["state"].items():
                state_dict["state"][index] = {**state, DISTANCE: unknown}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, hyperparameters and mode; an error changes nothing. Never writes parameters.

        Load the model's weights before or after. They must have been saved in the same mode as the
        state dict. `fused`, `foreach` and `capturable` depend on the machine. If the saved values
        cannot be used, this optimizer keeps its own, with a warning.

        Raises:
            ValueError: the state dict belongs to another model or optimizer, or holds an
                invalid option or value. The optimizer has not changed.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"the state dict must be a dict, got {type(state_dict).__name__}")
        before = dict(self.__dict__)
        # A hook registered now runs after the user's own, so it sees what they made of the dict.
        prepare = partial(
            checkpoint.prepare, names=self._store.names(), find_backend=self._find_backend
        )
        handle = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__.update(before)
            raise
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._reconcile()
        self._distance.finish()
        group = None if self.process_group is None else SharedGroup(self.process_group)
        own = {
            "process_group": group,
            "distributed": self.distributed,
            "_explicit": self._explicit,
            "_switching": self._switching,
            "_cut_short": self._cut_short,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt what a copy, a pickle or the base class's load_state_dict brings."""
        shared = state.get("process_group")
        if shared is not None:
            state = {**state, "process_group": shared.group}
        super().__setstate__({"_switching": False, "_cut_short": False, **state})
        checkpoint.complete(self.param_groups, self.state, self.defaults)
        self._store, self._watch = StateStore(), WriteWatch()
        self._store.made_for = [group["precondition"] for group in self.param_groups]
        self._rebuild()
        self._store.create_missing()

    # ------------------------------------------------------------------ inspection

    @torch.no_grad()
    def diagnostics(self) -> Diagnostics:
        """Phase, t, distance, steps to the next reset; per group μ, η and the two forces."""
        self._reconcile()
        self._distance.finish()
        return diagnose(self._store, self._store.step_options(self._distance.variables))

    def __repr__(self) -> str:
        self._store.bind(self.param_groups, self.state)
        return describe(self._store)
