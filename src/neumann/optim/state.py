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

from neumann.optim import checkpoint
from neumann.optim.checkpoint import CLOCK, DISTANCE, ITERATE, MOMENTUM, OFFSET, SKIPPED
from neumann.optim.distance import distance_squared, scalar_dtype
from neumann.optim.execution import Device, Host, Implementation, choose
from neumann.optim.phases import Timetable, momentum_at
from neumann.optim.watch import Watch


@dataclass(frozen=True)
class Gathered:
    """What a step starts from, one entry a parameter."""

    parameters: list[Tensor]
    gradients: list[Tensor | None]
    states: list[dict[str, Any]]


class State(Optimizer):
    """The part of Neumann that creates, ties, saves and loads state."""

    _scalars: dict[str, Tensor]  # one for the optimizer: clock, r², skipped steps
    _momenta: list[Tensor]  # one for each group: μ of the last completed step
    _execution: Host | Device
    _watch: Watch

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
        return state

    def _settle_in(self) -> None:
        """After groups or state have changed: choose the implementation, tie the scalars."""
        if getattr(self, "_scalars", {}):
            self._execution.settle(self._scalars[DISTANCE])  # what its last step left pending
        implementation = choose(self.param_groups)
        on_device = implementation is Implementation.CUDA
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._execution = Device(device) if on_device else Host(implementation)
        self._watch = Watch()
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
        if not measured:
            self._measure_distance()

    def _timetable(self) -> Timetable:
        raise NotImplementedError

    def _measure_distance(self) -> None:
        """r² from the offsets themselves."""
        offsets = [state[OFFSET] for _, state in self._states() if OFFSET in state]
        scalar = self._scalars[DISTANCE]
        scalar.copy_(distance_squared(offsets, scalar.device))
        self._execution.forget()

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
        self._execution.settle(self._scalars[DISTANCE])
        return super().state_dict()

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

    def __getstate__(self) -> dict[str, Any]:
        self._execution.settle(self._scalars[DISTANCE])
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
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
                    entry[key] = checkpoint.unwrap(value, key, p)
                if ITERATE not in entry:
                    entry[ITERATE] = zeros(p, group)
        self._scalars = {}
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
