"""The readable update, one tensor at a time: slow, but autograd can record it."""

from neumann.optim.backends.host import HostBackend
from neumann.optim.phases import Coefficients
from neumann.optim.precision import apply_update
from neumann.optim.tensors import Tensors
from neumann.optim.update import update_single


class ReferenceBackend(HostBackend):
    """`update_single` on any device."""

    name = "reference"

    def update(self, index: int, tensors: Tensors, coefficients: Coefficients, seed: int) -> float:
        apply_update(tensors, coefficients, update_single, seed)
        return 0.0
