"""What the optimizer remembers: m and δ of each parameter, and one clock for all of them.

Scalars that belong to the whole optimizer (clock, r², skipped steps) or to a group (μ of the last
step) are one tensor each, repeated in every parameter's state, because distributed checkpoints keep
only `state` and `param_groups`. After a load they come back as many tensors and are tied together
again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from neumann.optim import checkpoint, preconditioner_state, traced
from neumann.optim.checkpoint import (
    CLOCK,
    DISTANCE,
    ITERATE,
    MOMENTUM,
    OFFSET,
    PRECONDITIONER,
    SKIPPED,
)
from neumann.optim.distance import distance_squared, scalar_dtype
from neumann.optim.execution import Device, Host, Implementation, choose
from neumann.optim.phases import Timetable, momentum_at
from neumann.optim.shards import Carried, Shards, local, shards_of
from neumann.optim.watch import Watch


@dataclass(frozen=True)
class Gathered:
    """What a step starts from, one entry a parameter."""

    parameters: list[Tensor]
    weights: list[Tensor]  # those of them, or those parts of them, that this process holds
    gradients: list[Tensor | None]
    states: list[dict[str, Any]]


class State(Optimizer):
    """The part of Neumann that creates, ties, saves and loads state."""

    _scalars: dict[str, Tensor]  # one for the optimizer: clock, r², skipped steps
    _momenta: list[Tensor]  # one for each group: μ of the last completed step
    _made_for: list[Any]  # the P of each group that its state was made for
    _execution: Host | Device
    _watch: Watch
    _shards: Shards | None  # None: this process has every parameter whole
    _variables: int | None  # over all processes, as they last met
    process_group: Any = None  # of the processes among which whole parameters were divided

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Parameters that have state, in the order of the groups."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if state is not None:
                    yield p, state

    def _create_states(self, index: int) -> None:
        """State for the parameters of a group that require gradients.

        Made before the first step, because torch's distributed checkpoints would otherwise call
        step() to have it made, and the clock would tick. Frozen parameters wait until they have a
        gradient: they may be most of the model.
        """
        for p in self.param_groups[index]["params"]:
            if p.requires_grad and p not in self.state:
                self._create_state(p, index)

    def _create_state(self, p: Tensor, index: int) -> dict[str, Any]:
        group = self.param_groups[index]
        state: dict[str, Any] = self.state[p]
        state.update(self._scalars)
        state[MOMENTUM] = self._momenta[index]
        state[ITERATE] = zeros(p, group)
        if has_forces(group):
            state[OFFSET] = zeros(p, group)
        state.update(preconditioner_state.created(p, group))
        return state

    def _settle_in(self) -> None:
        """After groups or state have changed: choose the implementation, tie the scalars."""
        if getattr(self, "_scalars", {}):
            self._settle()  # what the last step left pending
        parameters = [p for group in self.param_groups for p in group["params"]]
        shards = shards_of(parameters, self.process_group)
        if shards is not None and self.param_groups[0]["differentiable"]:
            raise RuntimeError("differentiable=True cannot run here: the parameters are sharded")
        implementation = choose(self.param_groups, 1 if shards is None else shards.parts)
        self._shards, self._variables = shards, None
        on_device = implementation is Implementation.CUDA
        device = parameters[0].device if parameters else torch.device("cpu")
        self._execution = Device(device) if on_device else Host(implementation)
        self._watch = Watch()
        traced.prepare()
        places = {key: device if on_device else torch.device("cpu") for key in checkpoint.KEYS}
        places[DISTANCE] = device
        grouped = [
            [self.state[p] for p in group["params"] if p in self.state]
            for group in self.param_groups
        ]

        def tied(key: str, states: list[dict[str, Any]], default: float) -> Tensor:
            place = places[key]
            dtype = torch.int64 if key in (CLOCK, SKIPPED) else scalar_dtype(place)
            found = next((state[key] for state in states if key in state), default)
            if isinstance(found, Tensor) and found.is_meta:
                found = 0  # of parameters that have been materialised since
            tensor = torch.as_tensor(found, dtype=dtype, device=place)
            for state in states:
                state[key] = tensor
            return tensor

        states = [state for _, state in self._states()]
        measured = any(DISTANCE in state for state in states)
        before = getattr(self, "_scalars", {})  # where no parameter has state yet
        self._scalars = {
            key: tied(key, states, before.get(key, 0)) for key in (CLOCK, SKIPPED, DISTANCE)
        }
        t = self._timetable().place(int(self._scalars[CLOCK])).t
        self._momenta = [
            tied(MOMENTUM, among, momentum_at(t, group["momentum"]))
            for group, among in zip(self.param_groups, grouped, strict=True)
        ]
        if self._shards is not None:
            self._shards.are_known = int(self._scalars[CLOCK]) == 0  # at first every δ is 0
        elif not measured or bool(self._scalars[DISTANCE].isnan()):
            self._measure_distance()

    def _settle(self) -> None:
        """Bring r² up to date, if this process knows all of it."""
        if self._shards is None:
            self._execution.settle(self._scalars[DISTANCE])

    def _timetable(self) -> Timetable:
        raise NotImplementedError

    def _measure_distance(self) -> None:
        """r² from the offsets themselves."""
        offsets = [state[OFFSET] for _, state in self._states() if OFFSET in state]
        scalar = self._scalars[DISTANCE]
        scalar.copy_(distance_squared(offsets, scalar.device))
        self._execution.forget()

    def _forget_distance(self) -> None:
        """r² is 0, because every δ is or because none is kept."""
        self._scalars[DISTANCE].zero_()
        self._execution.forget()
        if self._shards is not None:
            self._shards.sums.zero_()

    def _tie(self) -> None:
        """Mend what others did to the state behind our back.

        ZeroRedundancyOptimizer puts loaded state into place past :meth:`load_state_dict`: another
        clock is another run's, and everything is theirs. Lightning moves all but the clock from
        device to device, one tensor at a time: what is not ours any more is a stale copy.
        """
        first = next((p for g in self.param_groups for p in g["params"] if p.requires_grad), None)
        if first is not None and self.state and self._is_strange(first):
            self._adopt_parameters()
        _, state = next(self._states(), (None, None))
        if state is None:
            return
        if state.get(CLOCK) is not self._scalars[CLOCK]:
            self._scalars = {}
            self._settle_in()
        elif any(state[key] is not ours for key, ours in self._scalars.items()):
            for group, momentum in zip(self.param_groups, self._momenta, strict=True):
                for p in group["params"]:
                    if p in self.state:
                        self.state[p].update(self._scalars, **{MOMENTUM: momentum})

    def _is_strange(self, p: Tensor) -> bool:
        """Whether a parameter is not the one that state was made for."""
        state = self.state.get(p)
        return not state or (local(state[ITERATE]).is_meta and not local(p).is_meta)

    def _adopt_parameters(self) -> None:
        """Parameters were put in the place of others, or materialised.

        Accelerate does the one when it shards a model, `to_empty` the other.
        """
        parameters = {p for group in self.param_groups for p in group["params"]}
        for p in [p for p in self.state if p not in parameters or self._is_strange(p)]:
            del self.state[p]
        self._settle_in()
        for index in range(len(self.param_groups)):
            self._create_states(index)

    def _name_of(self, weights: Tensor) -> str:
        """What to call the parameter that has these weights."""
        return next(name for p, name in self._names().items() if local(p) is weights)

    def _names(self) -> dict[Tensor, str]:
        """What to call each parameter in a message."""
        names = {}
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                given = group.get("param_names")
                names[p] = given[i] if given else f"parameter {i} of group {g}"
        return names

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with everything that a bit-identical continuation needs."""
        self._tie()
        self._settle()
        state_dict = super().state_dict()
        preconditioner_state.name_in(state_dict["param_groups"])
        if self._shards is not None:
            # This process knows r² of the last step and its own share of the next. NaN says:
            # measure it, whatever the shards are then.
            unknown = torch.full_like(self._scalars[DISTANCE], torch.nan)
            for index, state in state_dict["state"].items():
                state_dict["state"][index] = {**state, DISTANCE: unknown}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt state, hyperparameters and mode. Parameters are never written.

        Load the model's weights before or after, saved in the same mode as the state dict.
        """

        def prepare(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            checkpoint.check_fits(self.param_groups, self._names(), loaded)
            groups = preconditioner_state.adopted(self.param_groups, loaded["param_groups"])
            preconditioner_state.check_loaded(
                self.param_groups, groups, loaded["state"], self._names()
            )
            return checkpoint.wrap({**loaded, "param_groups": groups})

        # A hook registered now runs after the user's own, so it sees what they made of the dict.
        handle = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._tie()
        self._settle()
        carried = None if self.process_group is None else Carried(self.process_group)
        return {**super().__getstate__(), "process_group": carried}

    def __setstate__(self, state: dict[str, Any]) -> None:
        carried = state.get("process_group")
        if carried is not None:
            state = {**state, "process_group": carried.group}
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # a key that an older state dict does not have
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state.get(p)
                if entry is None:
                    continue
                for key, value in entry.items():
                    if not key.startswith(PRECONDITIONER):
                        entry[key] = checkpoint.unwrap(value, key, p)
                preconditioner_state.load(entry, p, group)
                if ITERATE not in entry:
                    entry[ITERATE] = zeros(p, group)
        self._scalars = {}
        self._made_for = [group["precondition"] for group in self.param_groups]
        self._settle_in()
        for index in range(len(self.param_groups)):
            self._create_states(index)


def zeros(p: Tensor, group: dict[str, Any]) -> Tensor:
    """A fresh m or δ for the parameter."""
    dtype = p.dtype if group["state_dtype"] is None or p.is_complex() else group["state_dtype"]
    return torch.zeros_like(p, dtype=dtype, requires_grad=False)


def has_forces(group: dict[str, Any]) -> bool:
    """Whether the average is needed at all."""
    return bool(group["cubic"] or group["repulsive"])
