"""The interface of a preconditioner."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from neumann.validation import is_number, require

States = Sequence[dict[str, Tensor]]


@runtime_checkable
class Preconditioner(Protocol):
    """What turns gradients into the directions of the update.

    A preconditioner has no state itself. Everything it remembers is in the tensors that `create`
    makes for each parameter; they are saved, loaded and moved with the optimizer's state. If it has
    an attribute `before`, another preconditioner, it receives the directions of that one instead of
    gradients. An attribute `narrow` names tensors of the state for which bfloat16 is enough: with
    `state_dtype=torch.bfloat16` they are stored in it, and `apply` gets them in float32.

    If P has no state for parameters that are not elementwise, processes can divide these among
    themselves: each calls `apply` with some of them (see `exchange`). A method
    `count_operations(parameter)` gives the work by which they are balanced; the default is the
    number of elements. A method `is_separable(parameter)` says that the direction of each entry of
    the first dimension depends on that entry alone; if a parameter is sharded along it, `apply`
    sees the shards.
    """

    @property
    def name(self) -> str:
        """Identifies it in checkpoints; must differ from the names of the built-in ones."""

    def elementwise(self, parameter: Tensor) -> bool:
        """Whether an element's direction depends on that element's gradients alone.

        If so, the state of a sharded parameter is sharded like it, and `apply` sees the shards. If
        not, `apply` sees the whole gradient, and every process keeps the whole state.
        """

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a new parameter, by name."""

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        """P(g) of each gradient, as new tensors of the same shapes; updates the states in place.

        The direction of a parameter must not depend on the gradients of others.
        The gradients are float32 or float64, on one device, and must not be changed. Write to the
        tensors of a state, as with `mul_` and `copy_`; never replace them. Complex gradients and
        states come as pairs of reals, in a last dimension of 2. Nothing here may wait for the
        device.
        """


_PARTS = ("name", "elementwise", "create", "apply")


def is_preconditioner(given: Any) -> bool:
    """Whether this is a preconditioner: an object, not its class."""
    return isinstance(given, Preconditioner) and not isinstance(given, type)


def describe_missing(given: Any) -> str:
    """Which parts of the interface an object lacks, for an error message."""
    missing = [] if isinstance(given, type) else [p for p in _PARTS if not hasattr(given, p)]
    return f", which has no {', '.join(missing)}" if missing else ""


def require_decay(decay: Any) -> None:
    """Raise a ValueError unless this can be the decay of a moving mean."""
    require(is_number(decay) and 0 <= decay < 1, "decay", decay, "in [0, 1)")
