"""Several processes that train together: who this is, and what all of them know."""

from dataclasses import dataclass

from torch import Tensor, distributed


@dataclass(frozen=True)
class Process:
    """This process among those that train together."""

    rank: int = 0
    ranks: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes the records."""
        return self.rank == 0


def added_up(values: Tensor, process: Process) -> Tensor:
    """The sum over all processes."""
    if process.ranks > 1:
        distributed.all_reduce(values)
    return values
