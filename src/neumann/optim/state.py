"""What the optimizer remembers: m and δ of each parameter, and one clock for all of them.

Scalars of the whole optimizer (clock, r², skipped steps) or of a group (μ of the last step) are one
tensor each, repeated in every parameter's state, because distributed checkpoints keep only `state`
and `param_groups`. After a load they come back as many tensors and are tied together again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from neumann.optim.distance import scalar_dtype
from neumann.optim.dtensor import local_gradient, local_part
from neumann.optim.option_checks import check_preconditioner
from neumann.optim.options import StepOptions, keeps_average
from neumann.optim.phases import Timetable, momentum_at
from neumann.optim.preconditioners.memory import create_memory, load_memory
from neumann.optim.tensors import Tensors

# Scalars that every parameter's state repeats: one tensor each per optimizer, or per group (μ).
CLOCK, DISTANCE, SKIPPED, MOMENTUM = "step", "distance_squared", "skipped", "momentum"
# Tensors shaped like the parameter: m, the Neumann iterate (a phase is called so too), δ, and w
# while the parameter itself holds w − μm.
ITERATE, OFFSET, WEIGHTS = "iterate", "offset", "weights"
KEYS = (CLOCK, DISTANCE, SKIPPED, MOMENTUM, ITERATE, OFFSET, WEIGHTS)


class StateStore:
    """The state of an optimizer's parameters.

    It works on the `param_groups` and `state` of the optimizer, which `bind` hands to it: torch
    replaces both when it loads a state dict.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        self.state: Any = {}
        self.scalars: dict[str, Tensor] = {}  # of the optimizer: clock, r², skipped steps
        self.momenta: list[Tensor] = []  # of each group: μ of the last completed step
        self.made_for: list[Any] = []  # of each group: the P that its state was made for
        self._ended: set[Tensor] = set()  # frozen parameters whose m was set to 0

    def bind(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Work on these groups and this state from now on."""
        self.groups, self.state = groups, state

    def entries(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Parameters that have state, in the order of the groups."""
        for group in self.groups:
            for p in group["params"]:
                state = self.state.get(p)
                if state is not None:
                    yield p, state

    def names(self) -> dict[Tensor, str]:
        """What to call each parameter in a message."""
        names = {}
        for g, group in enumerate(self.groups):
            for i, p in enumerate(group["params"]):
                given = group.get("param_names")
                names[p] = given[i] if given else f"parameter {i} of group {g}"
        return names

    def name_of(self, weights: Tensor) -> str:
        """What to call the parameter with these local weights."""
        return next(name for p, name in self.names().items() if local_part(p) is weights)

    # ------------------------------------------------------------------ creating

    def create_missing(self) -> None:
        """Create state for parameters that require gradients and have none.

        This happens before the first step. Otherwise torch's distributed checkpoints would call
        step() to create it, and the clock would tick. Frozen parameters wait until they have a
        gradient: they may be most of the model.
        """
        for index, group in enumerate(self.groups):
            for p in group["params"]:
                if p.requires_grad and p not in self.state:
                    self._create(p, index)

    def _create(self, p: Tensor, index: int) -> dict[str, Any]:
        group = self.groups[index]
        state: dict[str, Any] = self.state[p]
        state.update(self.scalars)
        state[MOMENTUM] = self.momenta[index]
        state[ITERATE] = make_zeros(p, group)
        if keeps_average(group):
            state[OFFSET] = make_zeros(p, group)
        state.update(create_memory(p, group))
        return state

    # ------------------------------------------------------------------ scalars

    def tie_scalars(self, device: torch.device, on_device: bool) -> bool:
        """Make each scalar one tensor again, on the device if a backend wants that.

        Returns whether r² is known. If not, the offsets have to be measured.
        """
        host = torch.device("cpu")
        states = [state for _, state in self.entries()]
        known = any(DISTANCE in state for state in states)
        before = self.scalars  # for when no parameter has state yet
        self.scalars = {
            key: _tie(key, states, before.get(key, 0), place)
            for key, place in (
                (CLOCK, device if on_device else host),
                (SKIPPED, device if on_device else host),
                (DISTANCE, device),
            )
        }
        t = self.timetable().place(int(self.scalars[CLOCK])).t
        self.momenta = []
        for group in self.groups:
            among = [self.state[p] for p in group["params"] if p in self.state]
            default = momentum_at(t, group["momentum"])
            self.momenta.append(_tie(MOMENTUM, among, default, device if on_device else host))
        return known and not bool(self.scalars[DISTANCE].isnan())

    def has_foreign_clock(self) -> bool:
        """Whether somebody put another run's state into place, as ZeroRedundancyOptimizer does."""
        _, state = next(self.entries(), (None, None))
        return state is not None and state.get(CLOCK) is not self.scalars.get(CLOCK)

    def repair_scalars(self) -> None:
        """Put our scalars back where they were replaced by copies.

        Lightning moves everything but the clock from device to device, one tensor at a time.
        """
        _, state = next(self.entries(), (None, None))
        if state is None or all(state[key] is ours for key, ours in self.scalars.items()):
            return
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            for p in group["params"]:
                if p in self.state:
                    self.state[p].update(self.scalars, **{MOMENTUM: momentum})

    # ------------------------------------------------------------------ replaced parameters

    def has_replaced_parameters(self) -> bool:
        """Whether parameters were put in place of others, materialized, or moved before a step.

        Accelerate does the first when it shards a model, `to_empty` the second, and who builds the
        optimizer before `model.cuda()` the third.
        """
        first = next((p for g in self.groups for p in g["params"] if p.requires_grad), None)
        return first is not None and bool(self.state) and self._is_replaced(first)

    def drop_replaced(self) -> None:
        """Drop the state of parameters that are no longer there, or of which it is not."""
        parameters = {p for group in self.groups for p in group["params"]}
        for p in [p for p in self.state if p not in parameters or self._is_replaced(p)]:
            del self.state[p]

    def _is_replaced(self, p: Tensor) -> bool:
        """Whether the state was not made for this parameter as it is now."""
        state = self.state.get(p)
        if not state:
            return True
        m, w = local_part(state[ITERATE]), local_part(p)
        if m.device == w.device or w.is_meta:
            return False
        return m.is_meta or not int(self.scalars[CLOCK])  # moved before the first step

    # ------------------------------------------------------------------ a step

    def gather(self, *, sharded: bool, on_new_parameters: Callable[[], None]) -> list[Tensors]:
        """The tensors of each group: of parameters that have state, and of those that get it now.

        Creates missing state, and starts the averages if forces were switched on. Frozen parameters
        that never had a gradient are left out.
        """
        indices = range(len(self.groups))
        return [self._gather_group(index, sharded, on_new_parameters) for index in indices]

    def _gather_group(
        self, index: int, sharded: bool, on_new_parameters: Callable[[], None]
    ) -> Tensors:
        # Whole lists: a Python loop over thousands of parameters would dominate the step.
        group = self.groups[index]
        parameters = group["params"]
        states: list[Any] = list(map(self.state.get, parameters))
        if not all(states):
            if any(p.requires_grad and p not in self.state for p in parameters):
                on_new_parameters()
            parameters = [
                p for p in parameters if p.requires_grad or p.grad is not None or p in self.state
            ]
            states = [self.state.get(p) or self._create(p, index) for p in parameters]
        if keeps_average(group) and not all(OFFSET in state for state in states):
            for p, state in zip(parameters, states, strict=True):
                if OFFSET not in state:  # forces were off until now: the average starts here
                    state[OFFSET] = make_zeros(p, group)
        weights, gradients = parameters, [p.grad for p in parameters]
        iterates = [state[ITERATE] for state in states]
        offsets = [state[OFFSET] for state in states] if keeps_average(group) else None
        if sharded:
            weights = [local_part(p) for p in parameters]
            gradients = list(map(local_gradient, gradients, parameters))
            iterates = [local_part(m) for m in iterates]
            offsets = None if offsets is None else [local_part(offset) for offset in offsets]
        if {g.layout for g in gradients if g is not None} - {torch.strided}:
            sparse = next(
                p for p in parameters if p.grad is not None and p.grad.layout != torch.strided
            )
            raise RuntimeError(
                f"Neumann does not support sparse gradients, and {self.names()[sparse]} has one: "
                "give that parameter to torch.optim.SparseAdam, or build its layer with "
                "sparse=False"
            )
        options: Any = group
        return Tensors(
            weights, gradients, iterates, offsets, parameters, states, options, self.momenta[index]
        )

    def end_frozen(self, gathered: list[Tensors]) -> None:
        """Set m of parameters that were frozen to 0.

        The rest of the network adapts to their w from now on, so w − μm must not differ from it.
        """
        frozen = [pair for tensors in gathered for pair in tensors.find_frozen()]
        traced = torch.compiler.is_compiling()
        for p, m in frozen:
            if traced or p not in self._ended:
                m.zero_()
        if not traced:
            self._ended = {p for p, _ in frozen}

    def drop_averages(self, gathered: list[Tensors]) -> bool:
        """Drop the averages if forces were switched off; returns whether there were any."""
        if keeps_average(self.groups[0]):
            return False
        if not any(OFFSET in state for tensors in gathered for state in tensors.states):
            return False
        for _, state in self.entries():
            state.pop(OFFSET, None)
        return True

    def follow_preconditioners(self, gathered: list[Tensors]) -> None:
        """Fit the state to a P that was chosen for a group since the last step."""
        for index, group in enumerate(self.groups):
            chosen, before = group["precondition"], self.made_for[index]
            if chosen is not before and chosen != before:
                check_preconditioner(group)
                tensors = gathered[index]
                for p, state in zip(tensors.parameters, tensors.states, strict=True):
                    load_memory(state, p, group)
                self.made_for[index] = chosen

    # ------------------------------------------------------------------ options of a step

    def timetable(self) -> Timetable:
        """When the phases come."""
        first = self.groups[0]
        return Timetable(first["warmup_steps"], first["reset_steps"], first["reset_growth"])

    def step_options(self, variables: int | None) -> StepOptions:
        """What a step needs of the options.

        `variables` is the "num variables" of the paper over all processes, None if they have not
        communicated. An option that is a number wins.
        """
        first = self.groups[0]
        repulsive = 0.0
        if first["repulsive"]:  # counting takes a loop over the parameters
            if variables is None or not isinstance(first["variables"], str):
                variables = self.count_variables()
            repulsive = first["repulsive"] * variables
        return StepOptions(
            self.timetable(), first["cubic"], repulsive, first["average"], first["bounded"]
        )

    def count_skipped(self, skipped: Tensor | None) -> None:
        """Add to the count of skipped steps; None: nobody checks."""
        if skipped is not None:
            self.scalars[SKIPPED].add_(skipped)

    def count_variables(self) -> int:
        """The "num variables" of the paper, over the parameters of this process."""
        variables = self.groups[0]["variables"]
        if not isinstance(variables, str):
            return int(variables)
        counted = [p for group in self.groups for p in group["params"] if p.requires_grad]
        return len(counted) if variables == "tensors" else sum(p.numel() for p in counted)


def make_zeros(p: Tensor, group: dict[str, Any]) -> Tensor:
    """A fresh m or δ for the parameter."""
    dtype = p.dtype if group["state_dtype"] is None or p.is_complex() else group["state_dtype"]
    return torch.zeros_like(p, dtype=dtype, requires_grad=False)


def _tie(key: str, states: list[dict[str, Any]], default: Any, place: torch.device) -> Tensor:
    """One tensor for a scalar that the states repeat."""
    dtype = torch.int64 if key in (CLOCK, SKIPPED) else scalar_dtype(place)
    found = next((state[key] for state in states if key in state), default)
    if isinstance(found, Tensor) and found.is_meta:
        found = 0  # of parameters that have been materialized since
    tensor = torch.as_tensor(found, dtype=dtype, device=place)
    for state in states:
        state[key] = tensor
    return tensor
