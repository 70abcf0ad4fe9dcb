"""r² between two steps: who knows it, and how it is brought up to date.

The state holds r² as a scalar. A backend may leave its update for later, and with sharded
parameters a process has only its own sums until all processes have added theirs up.
"""

from torch import Tensor

from neumann.optim.backends import Backend
from neumann.optim.distance import distance_squared
from neumann.optim.distributed import Sharding
from neumann.optim.options import keeps_average
from neumann.optim.state import CLOCK, DISTANCE, OFFSET, StateStore
from neumann.optim.tensors import Tensors


class DistanceTracker:
    """Keeps the r² of a state store right, for one backend and one sharding.

    `sharding` is None if this process has every parameter whole.
    """

    def __init__(self, store: StateStore, backend: Backend, sharding: Sharding | None) -> None:
        self._store, self._backend, self._sharding = store, backend, sharding
        self.variables: int | None = None  # of the whole process group, as of the last step

    def start(self, is_known: bool) -> None:
        """Continue with the r² that the state brought along; `is_known`: it did bring one."""
        if self._sharding is not None:
            clock, squared = self._store.scalars[CLOCK], self._store.scalars[DISTANCE]
            self._sharding.sums_are_known = int(clock) == 0  # at first every δ is 0
            if not keeps_average(self._store.groups[0]):
                squared.zero_()  # no step will measure it
        elif not is_known:
            self.measure()

    def finish(self) -> None:
        """Bring r² up to date, if this process knows all of it."""
        if self._sharding is None:
            self._backend.finish_distance(self._store.scalars[DISTANCE])

    def measure(self) -> None:
        """Compute r² from the offsets themselves."""
        offsets = [state[OFFSET] for _, state in self._store.entries() if OFFSET in state]
        scalar = self._store.scalars[DISTANCE]
        scalar.copy_(distance_squared(offsets, scalar.device))
        self._backend.forget()

    def forget(self) -> None:
        """Set r² to 0: every δ is 0, or none is kept."""
        self._store.scalars[DISTANCE].zero_()
        self._backend.forget()
        if self._sharding is not None:
            self._sharding.sums.zero_()

    def reduce(
        self, sharding: Sharding, groups: list[Tensors], flag: Tensor | None
    ) -> Tensor | None:
        """Learn r² and the flag from all processes."""
        forces = keeps_average(self._store.groups[0])
        if forces and not sharding.sums_are_known:
            self._backend.measure(sharding.split(groups), sharding.sums)
            sharding.sums_are_known = True
        self._backend.finish_distance(sharding.sums)
        if not forces and flag is None:
            return None
        totals = sharding.reduce(self._store.count_variables(), flag)
        self._store.scalars[DISTANCE].copy_(totals.squared)
        self.variables = totals.variables
        return totals.flags
