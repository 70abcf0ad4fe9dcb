"""The options of Neumann: their names and types, and what follows from their values.

What each option means is in the docstring of :class:`neumann.Neumann`. Their ranges are in
`option_checks`, the defaults that depend on P in `defaults`.
"""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from neumann.optim.phases import Timetable
from neumann.optim.preconditioners import Preconditioner


class OwnOptions(TypedDict):
    """What may differ between parameter groups."""

    lr: float | Tensor
    momentum: float
    weight_decay: float
    decoupled_weight_decay: bool
    precondition: str | Preconditioner | None
    maximize: bool


class CommonOptions(TypedDict):
    """What must agree in all groups, because there is one clock and one distance."""

    cubic: float
    repulsive: float
    average: float
    bounded: bool
    variables: str | int
    warmup_steps: int
    reset_steps: int
    reset_growth: float
    skip_nonfinite: bool
    state_dtype: torch.dtype | None
    foreach: bool | None
    differentiable: bool
    capturable: bool
    fused: bool | None
    training: bool  # the mode: whether the parameters hold w or w − μm


class GroupOptions(OwnOptions, CommonOptions):
    """A parameter group, apart from its parameters."""


OWN = tuple(OwnOptions.__annotations__)
COMMON = tuple(CommonOptions.__annotations__)
MACHINE = ("foreach", "fused", "capturable")  # say how steps run here, not what they compute
STATE_DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StepOptions:
    """What a step needs of the options that all groups have in common."""

    timetable: Timetable
    cubic: float  # α
    repulsive: float  # β, times the number of variables
    average: float  # γ
    bounded: bool

    @property
    def has_forces(self) -> bool:
        """Whether a force acts. β times the number of variables is 0 if all of them are frozen."""
        return bool(self.cubic or self.repulsive)


def keeps_average(group: Mapping[str, Any]) -> bool:
    """Whether a group has forces, and therefore an average to keep."""
    return bool(group["cubic"] or group["repulsive"])


def to_plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with Python numbers instead of NumPy's, which checkpoints could not load."""
    return {key: _to_plain(value) for key, value in group.items()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def make_lr_capturable(group: dict[str, Any]) -> None:
    """Move the learning rate to the device: a captured graph reads it there."""
    if group["capturable"] and group["params"]:
        group["lr"] = torch.as_tensor(
            group["lr"], dtype=torch.float64, device=group["params"][0].device
        )
