"""The readable update, one tensor at a time: slow, but autograd can record it."""

from neumann.optim.backends.host import HostBackend
from neumann.optim.phases import Row
from neumann.optim.update import Tensors, apply_update, update_single


class ReferenceBackend(HostBackend):
    """`update_single` on any device."""

    name = "reference"

    def update(self, index: int, tensors: Tensors, row: Row, seed: int) -> float:
        """See `HostBackend.update`."""
        apply_update(tensors, row, update_single, seed)
        return 0.0
